"""Which text may be used, what is kept of it, and the sequences cut from it."""

from __future__ import annotations

import json
from email.message import Message

import numpy as np
import pytest
from tiny_pretrain import LENGTH, VOCAB, batches, stream

from sparsity_lab import pretrain_text
from sparsity_lab.pretrain_data import IGNORE, Batches, encode_files, token_bytes, train_tokenizer, write_repeats
from sparsity_lab.pretrain_prepare import TextSettings, prepare
from sparsity_lab.pretrain_recipe import PretrainRecipe
from sparsity_lab.pretrain_text import TextFile, collect, licence


def meta(**fields):
    message = Message()
    for name, value in fields.items():
        for one in value if isinstance(value, list) else [value]:
            message[name.replace("_", "-")] = one
    return message


OSI = "License :: OSI Approved :: "


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"License_Expression": "MIT"}, "MIT"),
        ({"License_Expression": "BSD-3-Clause AND (MIT OR Apache-2.0)"}, "BSD-3-Clause AND (MIT OR Apache-2.0)"),
        ({"License_Expression": "MPL-2.0 AND MIT"}, None),
        ({"License_Expression": "Apache-2.0 WITH LLVM-exception"}, None),
        ({"License_Expression": "GPL-3.0-only", "License": "MIT"}, None),
        ({"Classifier": [OSI + "MIT License", "Typing :: Typed"]}, "MIT"),
        ({"Classifier": [OSI + "BSD License", OSI + "Apache Software License"]}, "Apache-2.0 AND BSD-3-Clause"),
        ({"Classifier": [OSI + "MIT License", OSI + "GNU General Public License (GPL)"]}, None),
        ({"Classifier": "License :: DFSG approved", "License": "MIT"}, None),
        ({"Classifier": "License :: OSI Approved", "License": "MIT"}, "MIT"),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0"),
        ({"License": "LGPL"}, None),
        ({}, None),
    ],
)
def test_only_packages_that_name_nothing_but_allowed_licences(fields, allowed):
    assert licence(meta(**fields))[0] == allowed


def test_what_is_collected_is_ordered_by_hash_and_there_once():
    corpus = collect(200_000, stdlib=False, packages=["rich", "packaging", "certifi"])
    assert set(corpus.packages) == {"rich", "packaging"}
    assert set(corpus.refused) == {"certifi"}, "MPL"
    digests = [file.digest for file in corpus.files]
    assert digests == sorted(set(digests))
    for name, about in corpus.packages.items():
        mine = [file for file in corpus.files if file.package == name]
        assert about["bytes"] == sum(file.size for file in mine) <= 200_000
        assert about["files"] == len(mine) > 0
        assert about["version"]
        assert about["licence"]
    train, held = corpus.split(20)
    assert not {file.digest for file in train} & {file.digest for file in held}
    assert len(train) + len(held) == len(corpus.files)
    assert 0.05 < len(held) / len(corpus.files) < 0.4


def test_other_peoples_code_inside_a_package_is_left_out():
    for place in ("pip/_vendor/x.py", "a/third_party/b.py", "scipy/extern/c.py", "d/licenses/e.txt"):
        assert pretrain_text._FOREIGN.search(place), place
    for place in ("torch/vendors.py", "a/external_data.py", "extern.py"):
        assert not pretrain_text._FOREIGN.search(place), place


WORDS = [a + b + c for a in ("ka", "lo", "mi") for b in ("ren", "sta") for c in ("do", "fu", "ge")]
TEXTS = [
    TextFile("made up", "code", f"def {a}_{i}({b}):\n    return {b} + {i} - {c}\n" * 8, f"{i:064x}")
    for i, (a, b, c) in enumerate(zip(WORDS * 3, WORDS[5:] * 3, WORDS[7:] * 3, strict=False))
]


def test_the_tokenizer_depends_on_the_text_alone_and_loses_nothing():
    one, two = (train_tokenizer(TEXTS, 320, 10_000_000) for _ in range(2))
    assert one.get_vocab() == two.get_vocab()
    assert len(one) == 320
    ids = encode_files(one, TEXTS[:3])
    assert ids[-1] == one.eos_token_id == 0
    assert one.decode(ids) == "<|endoftext|>".join([*(f.text for f in TEXTS[:3]), ""])
    assert token_bytes(one)[ids].sum() == sum(file.size for file in TEXTS[:3])
    with pytest.raises(ValueError, match="vocab_size=100"):
        train_tokenizer(TEXTS, 100, 1000)
    with pytest.raises(ValueError, match="vocab_size=9999: the text gives only"):
        train_tokenizer(TEXTS, 9999, 1000)


def test_batches_depend_on_seed_and_step_alone():
    recipe = PretrainRecipe(steps=1, sequences=4, length=LENGTH, tile=32, stride=8)
    one, two = batches(recipe), batches(recipe)
    later = one.at(7)[0]
    for step in (7, 2):
        np.testing.assert_array_equal(one.at(step)[0], two.at(step)[0])
    np.testing.assert_array_equal(one.at(7)[0], later)
    assert not np.array_equal(one.at(1)[0], one.at(2)[0])
    assert not np.array_equal(batches(recipe, seed=1).at(7)[0], later)
    halves = [batches(recipe, rank=rank, world=2).at(7)[0] for rank in range(2)]
    rows = {tuple(row.tolist()) for half in halves for row in half}
    assert rows == {tuple(row.tolist()) for row in later}


def test_a_round_goes_through_the_whole_stream_and_shares_hold():
    made = Batches({"code": np.arange(1, 1001, dtype=np.int32)}, {"code": 1.0}, 2, 50, 2000)
    per_round = 999 // 50 - 1
    seen = [made._sequence("code", number) for number in range(per_round)]
    starts = sorted(int(inputs[0]) for inputs, _ in seen)
    assert np.diff(starts).tolist() == [50] * (per_round - 1)
    for inputs, targets in seen:
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
    mixed = batches(PretrainRecipe(steps=1, sequences=4, length=LENGTH, tile=32, stride=8))
    drawn = [mixed._before(kind, 100) for kind in ("code", "prose", "repeats")]
    assert drawn == [200, 100, 100]
    assert all(len(mixed.at(step)[0]) == 4 for step in range(10))


def test_repeats_stand_twice_and_only_the_second_counts():
    tokens = stream(1024)
    out, first = write_repeats(tokens, VOCAB, np.random.default_rng(3), slot=64)
    changed = np.flatnonzero(out != tokens)
    assert 0.1 < len(changed) / len(tokens) < 0.5
    spans = np.split(np.flatnonzero(first), np.flatnonzero(np.diff(np.flatnonzero(first)) > 1) + 1)
    text = out.tobytes()
    for span in spans:
        assert text.count(out[span].tobytes()) >= 2
    made = Batches({"code": stream(2000)}, {"code": 0.0, "repeats": 1.0}, 1, 512, VOCAB)
    _, targets = made.at(0)
    assert 0 < (targets == IGNORE).sum() < 256


@pytest.mark.parametrize(
    ("shares", "problem"),
    [({"code": 0.5}, "must add up to 1"), ({"poems": 1.0}, "must add up"), ({"prose": 1.0}, "only 10 tokens")],
)
def test_shares_that_cannot_be_are_refused(shares, problem):
    with pytest.raises(ValueError, match=problem):
        Batches({"code": stream(), "prose": stream(10)}, shares, 2, LENGTH, VOCAB)


def test_a_folder_of_text_is_made_once_and_only_with_its_settings(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.py").write_text(TEXTS[i].text * 4)
    (tmp_path / "copy.py").write_text(TEXTS[0].text * 4)
    settings = TextSettings(
        stdlib=False, packages=(), files=str(tmp_path), held_out_percent=20, held_out_sequences=3, tokenizer_bytes=9000
    )
    made = prepare(tmp_path / "data", settings, vocab_size=300, length=32)
    again = prepare(tmp_path / "data", settings, vocab_size=300, length=32)
    np.testing.assert_array_equal(made.streams["code"], again.streams["code"])
    assert made.held()[0].shape[1] == 32
    assert made.held(limit=2)[0].shape == (2, 32)
    corpus = json.loads((tmp_path / "data" / "corpus.json").read_text())
    assert corpus["files"]["code"] + 1 < 31, "the copy is left out, and what is held out"
    with pytest.raises(ValueError, match=r"length=48: .* was made with 32"):
        prepare(tmp_path / "data", settings, vocab_size=300, length=48)
    with pytest.raises(ValueError, match="held_out_percent=0"):
        TextSettings(held_out_percent=0)
