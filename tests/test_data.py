"""Documents: fixed, seeded, prefix-stable, lazily tokenised; and a clear error for every bad input."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from sparsity_lab import data, documents, textfiles

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


class Counting:
    """A tokenizer that counts the characters it is given."""

    eos_token_id = EOS

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return TOKENIZER(text, **options)


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    (folder / "deep").mkdir(parents=True)
    for i in range(6):
        body = "".join(f"Book {i}, sentence {n}: é {n * n}.\n" for n in range(30 + i))
        (folder / ("deep" if i % 2 else "") / f"b{i}.txt").write_text(body, encoding="utf-8")
    return folder


def same(a: data.Documents, b: data.Documents) -> bool:
    return [(d.index, d.id, d.name) for d in a] == [(d.index, d.id, d.name) for d in b]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# what a document is


def test_document_id_is_the_hash_of_its_tokens() -> None:
    document = data.Document(0, torch.tensor([1, 2, 300]), "x")
    raw = b"".join(i.to_bytes(8, "little") for i in (1, 2, 300))
    assert document.id == hashlib.sha256(raw).hexdigest()[:16]


def test_documents_is_a_sequence() -> None:
    found = data.pydoc(TOKENIZER, 3, 32)
    assert len(found) == 3
    assert [d.index for d in found] == [0, 1, 2]
    assert same(found[1:], data.pydoc(TOKENIZER, 2, 32, skip=1))
    assert found[0].tokens.shape == (32,)
    assert found[0].tokens.dtype == torch.int64
    assert not {"num_documents", "shard", "num_shards"} & found.source.keys()


# the stream


@pytest.mark.parametrize("eos", [True, False])
def test_text_is_the_joined_stream(books: Path, eos: bool) -> None:
    """Against the obvious way: tokenise every file whole, join, cut."""
    tokenizer = TOKENIZER if eos else tiny_tokenizer(eos_token=None)
    separator = [tokenizer.eos_token_id] if eos else tokenizer("\n")["input_ids"]
    files = sorted(books.rglob("*.txt"), key=lambda p: p.relative_to(books).as_posix())
    stream: list[int] = []
    for n, i in enumerate(np.random.default_rng(7).permutation(len(files))):
        stream += separator * (n > 0) + tokenizer(files[i].read_text(encoding="utf-8"))["input_ids"]
    count = len(stream) // 50
    found = data.text(tokenizer, books, count, 50, seed=7)
    assert torch.cat([d.tokens for d in found]).tolist() == stream[: count * 50]
    with pytest.raises(ValueError, match=rf"holds {len(stream):,} tokens, in which {count} documents of length=50 fit"):
        data.text(tokenizer, books, count + 1, 50, seed=7)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 12), skip=st.integers(0, 5), num_shards=st.integers(1, 4), seed=st.integers(0, 3))
def test_a_document_is_the_same_however_it_is_asked_for(count: int, skip: int, num_shards: int, seed: int) -> None:
    whole = data.pydoc(TOKENIZER, 20, 40, seed=seed)
    shards = []
    for shard in range(num_shards):
        if any(i % num_shards == shard for i in range(skip, skip + count)):
            shards += list(data.pydoc(TOKENIZER, count, 40, seed, skip=skip, shard=shard, num_shards=num_shards))
        else:
            with pytest.raises(ValueError, match="gets none"):
                data.pydoc(TOKENIZER, count, 40, seed, skip=skip, shard=shard, num_shards=num_shards)
    shards.sort(key=lambda d: d.index)
    assert [(d.index, d.id) for d in shards] == [(d.index, d.id) for d in whole[skip : skip + count]]


def test_seed_changes_the_order_and_the_source() -> None:
    a, b = data.pydoc(TOKENIZER, 2, 64, seed=0), data.pydoc(TOKENIZER, 2, 64, seed=1)
    assert a[0].id != b[0].id
    assert a.source != b.source
    assert a.source == data.pydoc(TOKENIZER, 5, 64, seed=0, num_shards=2).source


def test_no_more_is_tokenised_than_needed(tmp_path: Path) -> None:
    counting = Counting()
    data.stdlib(counting, 1, 16)
    assert counting.characters < 300_000
    counting = Counting()
    (tmp_path / "big.txt").write_text("a long line of words\n" * 50_000)
    data.text(counting, tmp_path / "big.txt", 2, 100)
    assert counting.characters < 2 * 66_000


def test_pieces_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfiles, "_PIECE", 7)
    monkeypatch.setattr(textfiles, "_CHUNK", 5)  # characters of several bytes fall across chunks
    body = "\ufeffone\ntwo é€😀 three four five\n\n" + "x" * 40 + "\r\nend"
    (tmp_path / "a.txt").write_bytes(body.encode())
    assert "".join(textfiles.pieces(tmp_path / "a.txt")) == body[1:].replace("\r\n", "\n")
    assert b"".join(textfiles.checked(tmp_path / "a.txt", "")) == body.encode()


def test_a_long_stream_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert TOKENIZER.model_max_length < 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.pydoc(tiny_tokenizer(), 1, 1000)
    assert "longer than" not in caplog.text


# the sources


def test_stdlib_is_source_without_tests() -> None:
    found = data.stdlib(TOKENIZER, 4, 128)
    assert same(found, data.stdlib(TOKENIZER, 4, 128))
    names = [p.as_posix() for p in data.python_files(Path(documents.__file__).parent)]
    assert any(name.endswith("documents.py") for name in names)
    root = Path(data.sysconfig.get_paths()["stdlib"])
    kept = {p.relative_to(root).as_posix() for p in data.python_files(root)}
    assert "json/decoder.py" in kept
    assert not [name for name in kept if {"test", "tests", "site-packages", "idlelib"} & set(name.split("/"))]


def test_file_folder_and_glob_give_the_same(books: Path) -> None:
    (books / ".hidden").write_bytes(b"\0")
    folder = data.text(TOKENIZER, books, 5, 50)
    pattern = data.text(TOKENIZER, str(books / "**" / "*.txt"), 5, 50)
    assert same(folder, pattern)
    assert folder.source == pattern.source
    one = data.text(TOKENIZER, books / "b0.txt", 1, 50)
    assert one[0].name == "text/0 b0.txt"
    (books / "b0.txt").write_text("edited " * 100)
    assert data.text(TOKENIZER, books / "b0.txt", 1, 50).source != one.source


def test_jsonl(tmp_path: Path) -> None:
    bodies = [f"line {i} " * 20 + "\u2028é" for i in range(8)]
    lines = [json.dumps({"body": b, "n": 1}, ensure_ascii=False) for b in bodies]
    path = write_lines(tmp_path / "a.jsonl", [*lines[:3], "", *lines[3:]])
    found = data.jsonl(TOKENIZER, path, 4, 60, seed=3, field="body")
    order = np.random.default_rng(3).permutation(8)
    stream = [i for n, k in enumerate(order) for i in [EOS] * (n > 0) + TOKENIZER(bodies[k])["input_ids"]]
    assert torch.cat([d.tokens for d in found]).tolist() == stream[:240]
    assert found[0].name == f"jsonl/0 a.jsonl:{order[0] + 1 + (order[0] >= 3)}"


def test_tokens_of_one_and_two_dimensions(tmp_path: Path) -> None:
    array = np.arange(100, dtype=np.uint16)
    np.save(tmp_path / "a.npy", array)
    found = data.tokens(tmp_path / "a.npy", 3, 30, seed=5)
    assert torch.cat([d.tokens for d in found]).tolist() == list(range(90))
    np.save(tmp_path / "b.npy", array.reshape(4, 25))
    found = data.tokens(tmp_path / "b.npy", 8, 10, seed=5)
    starts = [25 * int(row) + place for row in np.random.default_rng(5).permutation(4) for place in (0, 10)]
    assert [d.tokens[0].item() for d in found] == starts
    with pytest.raises(ValueError, match="holds 100 tokens, in which 8 documents of length=10 fit"):
        data.tokens(tmp_path / "b.npy", 9, 10)


def test_tokens_from_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"tokens": np.arange(64), "other": np.arange(3)}, tmp_path / "a.safetensors")
    found = data.load(
        "tokens", TOKENIZER, path=str(tmp_path / "a.safetensors"), num_documents=2, length=32, shard=1, num_shards=2
    )
    assert [d.index for d in found] == [1]
    assert found[0].tokens.tolist() == list(range(32, 64))


# errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_documents": 0}, "data.num_documents=0: must be at least 1"),
        ({"length": 1}, "data.length=1: must be at least 2"),
        ({"length": 2.5}, "data.length=2.5: must be an integer"),
        ({"num_documents": True}, "data.num_documents=True: must be an integer"),
        ({"seed": -1}, "data.seed=-1"),
        ({"skip": -1}, "data.skip=-1"),
        ({"num_shards": 0}, "data.num_shards=0"),
        ({"shard": 2, "num_shards": 2}, "data.shard=2: must be below num_shards=2"),
        ({"shard": 3, "num_shards": 4}, "shard=3 gets none of the num_documents=2 documents"),
        ({"length": None}, "data.length: missing"),
        ({"colour": 1}, "data.colour: not an option of data=pydoc, must be one of length, num_documents"),
        ({"vocab_size": 100}, r"token id \d+ is outside the vocabulary, must be below vocab_size=100"),
        ({"length": 10**6}, "in which 0 documents of length=1000000 fit; asked for num_documents=2. Lower"),
        ({"length": 10**6, "skip": 3}, "num_documents=2 after skip=3"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data.load("pydoc", TOKENIZER, **{"num_documents": 2, "length": 32, **options})


def test_unknown_source_lists_the_names() -> None:
    with pytest.raises(ValueError, match="data='wiki': unknown, must be one of pydoc, stdlib, text, jsonl, tokens"):
        data.load("wiki", TOKENIZER, num_documents=1, length=8)


@pytest.mark.parametrize("body", [b"abc\0def" * 20, "é".encode("latin-1") * 200, b"cut \xc3", b"\xff\xfeU\0"])
def test_a_file_that_is_not_text_is_named(books: Path, body: bytes) -> None:
    (books / "picture.png").write_bytes(body)
    with pytest.raises(ValueError, match=r"picture\.png is not text"):
        data.text(TOKENIZER, books, 1, 16)
    assert data.text(TOKENIZER, str(books / "*.txt"), 1, 16)


@pytest.mark.parametrize(
    ("path", "message"),
    [("none.txt", "no such file"), ("*.md", "no text file"), ("empty", "no text file"), ("", "path=''")],
)
def test_nothing_at_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        data.text(TOKENIZER, path, 1, 16)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"bad\.jsonl, line 3: not JSON"),
        ('{"body": "x"}', r"bad\.jsonl, line 3: no field='text', it has body"),
        ('{"text": 5}', r"line 3: field='text' must be a string, is int"),
        ("[1, 2]", r"line 3: must be an object with field='text', is a list"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", ['{"text": "fine"}', "", line])
    with pytest.raises(ValueError, match=message):
        data.jsonl(TOKENIZER, path, 1, 2)


def test_bad_token_files(tmp_path: Path) -> None:
    def check(name: str, message: str, array: Any = None, **options: Any) -> None:
        if array is not None:
            np.save(tmp_path / name, array, allow_pickle=True)
        with pytest.raises(ValueError, match=message):
            data.load("tokens", TOKENIZER, path=tmp_path / name, num_documents=1, length=4, **options)

    check("none.npy", "no such file")
    (tmp_path / "a.pt").write_bytes(b"x")
    check("a.pt", r"must be a \.npy or \.safetensors file \(pickles are not read\)")
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY cut")
    check("b.npy", "cannot be read")
    (tmp_path / "b.safetensors").write_bytes(b"x" * 30)
    check("b.safetensors", "cannot be read")
    check("object.npy", "cannot be read", np.array([[1], [1, 2]], dtype=object))
    check("float.npy", "must hold integers", np.ones(8))
    check("cube.npy", "must hold integers", np.ones((2, 2, 2), dtype=int))
    check(
        "big.npy",
        f"token id 5000 is outside the vocabulary, must be below vocab_size={len(TOKENIZER)}",
        np.full(8, 5000),
    )
    check("negative.npy", "token id -1 is negative", np.full(8, -1))
    check("small.npy", "holds 3 tokens, in which 0 documents of length=4 fit", np.arange(3))
