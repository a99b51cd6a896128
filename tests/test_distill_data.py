"""The mix of training documents, and the guard between training and held-out text."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from fake_model import documents
from tiny import tiny_tokenizer

from sparsity_lab import data
from sparsity_lab.distill_data import Mixture, check_apart, load_sources
from sparsity_lab.documents import Documents


def source(count: int, name: str, seed: int = 0, **changes) -> Documents:
    """Documents of the text called `name`; `changes` to what they say of themselves."""
    docs = documents(count, 16, seed=seed)
    return dataclasses.replace(docs, source={**docs.source, "name": name, "digest": name, "seed": 0, **changes})


def test_every_source_is_gone_through_whole_before_it_repeats():
    mixture = Mixture({"a": source(5, "a"), "b": source(3, "b", seed=1)}, {"a": 1.0, "b": 1.0})
    order = mixture.order(60, seed=2)
    for label, size in (("a", 5), ("b", 3)):
        ids = [d.id for d in mixture.sources[label]]
        drawn = [d.id for d in order if d.id in ids]
        for start in range(0, len(drawn) - size, size):
            assert sorted(drawn[start : start + size]) == sorted(ids)
    drawn = [d.id for d in order]
    assert drawn == [d.id for d in mixture.order(60, seed=2)]
    assert drawn[:10] == [d.id for d in mixture.order(10, seed=2)]
    assert drawn != [d.id for d in mixture.order(60, seed=3)]


def test_weights_are_shares_of_the_draws():
    mixture = Mixture({"a": source(2, "a"), "b": source(2, "b", seed=1)}, {"a": 3, "b": 1})
    ids = {d.id for d in mixture.sources["a"]}
    counts = Counter(d.id in ids for d in mixture.order(2000, seed=0))
    assert counts[True] / 2000 == pytest.approx(0.75, abs=0.04)


def test_mixtures_that_cannot_be():
    with pytest.raises(ValueError, match=r"data\.train\.a\.weight=0: must be above 0"):
        Mixture({"a": source(1, "a")}, {"a": 0})
    with pytest.raises(ValueError, match=r"data\.train=\[\]: needs at least one source"):
        Mixture({}, {})


def test_equal_documents_are_refused():
    train = {"code": source(4, "a")}
    with pytest.raises(ValueError, match=r"data\.held_out\.x: document 3 is in data\.train\.code too"):
        check_apart(train, {"x": dataclasses.replace(source(6, "other"), items=source(6, "other").items[3:])})
    check_apart(train, {"x": dataclasses.replace(source(6, "a"), items=source(6, "a").items[4:])})


@pytest.mark.parametrize(("key", "changes"), [("seed", {"seed": 1}), ("length", {"length": 8})])
def test_one_text_cut_in_two_ways_is_refused(key, changes):
    docs = source(2, "a", seed=9)
    other = dataclasses.replace(docs, source=docs.source | changes)
    with pytest.raises(ValueError, match=rf"same text as data\.train\.code, but with another {key}"):
        check_apart({"code": source(4, "a")}, {"x": other})
    check_apart({"code": source(4, "b")}, {"x": other})


def test_pydoc_split_by_skip_is_apart():
    tokenizer = tiny_tokenizer()
    train = data.pydoc(tokenizer, 6, 64, skip=3)
    check_apart({"p": train}, {"p": data.pydoc(tokenizer, 3, 64)})
    with pytest.raises(ValueError, match="document 3 is in"):
        check_apart({"p": train}, {"p": data.pydoc(tokenizer, 4, 64)})


def test_sources_come_by_label():
    prose = {"name": "pydoc", "num_documents": 3, "weight": 2}
    more = {"name": "pydoc", "label": "more", "num_documents": 1, "skip": 5}
    found, weights = load_sources([prose, more], tiny_tokenizer(), 32, "data.train")
    assert {label: len(docs) for label, docs in found.items()} == {"pydoc": 3, "more": 1}
    assert weights == {"pydoc": 2, "more": 1.0}
    assert Mixture(found, weights).describe()["pydoc"] == {**found["pydoc"].source, "num_documents": 3, "weight": 2}
    with pytest.raises(ValueError, match=r"data\.train\.1\.label=pydoc: given twice"):
        load_sources([prose, prose], tiny_tokenizer(), 32, "data.train")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"data\.train\.0\.name: missing"),
        ({"name": "pydoc"}, r"data\.train\.pydoc: data\.num_documents: missing"),
        ({"name": "book", "num_documents": 1}, r"data\.train\.book: data='book': unknown"),
        ({"name": "pydoc", "num_documents": 1, "wight": 1}, r"data\.train\.pydoc: data\.wight: not an option"),
    ],
)
def test_sources_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        load_sources([given], tiny_tokenizer(), 32, "data.train")
