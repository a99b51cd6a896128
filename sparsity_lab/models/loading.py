"""Loading Hugging Face causal LMs: where they come from, device and dtype, and what identifies them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from sparsity_lab.models.hf import HFModel
from sparsity_lab.models.hf_native import check_attention


def load(
    path: str,
    *,
    name: str | None = None,
    identity: str | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    attention: str = "native",
) -> HFModel:
    """Load a causal LM by hub name, local folder, or GGUF file (`gguf_file` inside `path`, or `path` itself).

    Weights come from safetensors or GGUF only, never from pickles, and all of them must be there.

    Args:
        name: what results call the model; None = the last part of its path.
        identity: its fingerprint, where the caller knows what the files are; None = of their content.
        revision: branch, tag or commit of a hub model.
        dtype: auto (float32 on a CPU, the checkpoint's own elsewhere), float32, bfloat16 or float16.
        device: auto (cuda if there), or any torch device.
        attn_implementation: sdpa, eager, ...; None = what transformers takes for this family.
        trust_remote_code: run Python files that come with the model.
        attention: native, or, for a model with an indexer of its own, dense: every layer attends to all it can see, and
            later layers see that.
    Raises:
        ValueError: an option out of range, nothing loadable at `path`, or weights missing from it; the message says
            what was tried.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not isinstance(trust_remote_code, bool):
        raise ValueError(f"model.trust_remote_code={trust_remote_code!r}: must be true or false")
    check_attention(attention)
    where = resolve_device(device)
    source, gguf_file = _locate(path, gguf_file)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file:
        common["gguf_file"] = gguf_file
    options: dict[str, Any] = {"dtype": resolve_dtype(dtype, where), "use_safetensors": True, **common}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **common)
    except Exception as error:  # missing, damaged, foreign: each library has its own, and all mean the same here
        raise ValueError(
            f"model.path={path}: could not be loaded as a causal LM from safetensors or GGUF "
            f"({type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}). Give a hub name that "
            "this machine can reach, a local folder with config.json and *.safetensors, or a GGUF file."
        ) from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ValueError(f"model.path={path}: has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    if not attn_implementation:
        _keep_softcap(model)
    identity = identity or fingerprint(source, gguf_file=gguf_file, revision=revision)
    title = name or (Path(gguf_file).stem if gguf_file else Path(source).resolve().name)
    return HFModel(model.to(where), tokenizer, name=title, fingerprint=identity, attention=attention)


def _keep_softcap(model: Any) -> None:
    """Some versions of transformers take sdpa by default, which has no soft-cap; `HFModel` refuses that."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if softcap and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def _locate(path: str, gguf_file: str | None) -> tuple[str, str | None]:
    """(local folder or hub name, GGUF file in it or None)."""
    local = Path(path).expanduser()
    if local.is_dir():
        if gguf_file and not (local / gguf_file).is_file():
            there = ", ".join(sorted(file.name for file in local.glob("*.gguf"))) or "none"
            raise ValueError(f"model.gguf_file={gguf_file}: not in {path}; GGUF files there: {there}")
        return str(local), gguf_file
    if local.suffix == ".gguf" and gguf_file:
        raise ValueError(f"model.path={path} is a GGUF file itself; leave model.gguf_file={gguf_file} out")
    if local.suffix == ".gguf" and local.is_file():
        return str(local.parent), local.name
    if local.is_file():
        raise ValueError(f"model.path={path}: is a file, but no GGUF; give the folder it lies in")
    if local.is_absolute() or local.suffix == ".gguf" or path.startswith(".") or path.count("/") > 1:
        raise ValueError(f"model.path={path}: no such file or folder")
    return path, gguf_file


def resolve_device(device: str) -> torch.device:
    """`auto` is cuda where there is one; anything else must be a torch device that exists here, else ValueError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"model.device={device}: not a torch device (auto, cpu, cuda, cuda:0, ...)") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"model.device={device}: this machine has no usable CUDA device; use device=auto or device=cpu"
        )
    try:
        torch.zeros(1, device=where).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"model.device={device}: not usable on this machine ({str(error).splitlines()[0]})") from error
    return where


def resolve_dtype(dtype: str, device: torch.device) -> Any:
    """torch dtype, or "auto" (the checkpoint's own) where the device is an accelerator; ValueError for others."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"model.dtype={dtype}: must be auto, float32, bfloat16 or float16")
    return getattr(torch, dtype)


def fingerprint(path: str, *, gguf_file: str | None = None, revision: str | None = None) -> str:
    """16 hex digits of everything that makes the model's outputs.

    Of a folder: the content of the GGUF file, or of config.json, *.safetensors and *.py, wherever the folder lies. Of a
    hub model: its name, file and commit (a commit is the digest of a repository's content).
    """
    folder = Path(path)
    if folder.is_dir():
        patterns = ("config.json", "*.safetensors", "*.py")
        files = [folder / gguf_file] if gguf_file else [file for p in patterns for file in sorted(folder.glob(p))]
        parts = []
        for file in files:
            with file.open("rb") as handle:
                parts.append(hashlib.file_digest(handle, "sha256").hexdigest())
    else:
        parts = [path, gguf_file or "", _commit(path, gguf_file or "config.json", revision)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _commit(repository: str, file: str, revision: str | None) -> str:
    """Commit of the snapshot in the hub cache that `file` was loaded from; later transformers note it nowhere else."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    commit = extract_commit_hash(cached_file(repository, file, revision=revision, local_files_only=True), None)
    if commit is None:
        raise ValueError(f"model.path={repository}: its commit is not known, so results could not say what they are of")
    return commit
