"""Retrieval tasks: what is hidden, where its tokens stand, how answers are scored."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_tokenizer

from sparsity_lab.documents import Document
from sparsity_lab.evaluation import needles
from sparsity_lab.evaluation.needles import KINDS, make_task, score

TEXT = "".join(f"line {i} tells of nothing in particular, once more.\n" for i in range(400))
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>\n{% endfor %}<assistant>"


def document(tokenizer, text=TEXT, length=2000):
    return Document(3, torch.tensor(tokenizer(text)["input_ids"][:length]), "lines")


@pytest.fixture(params=[None, TEMPLATE], ids=["plain", "chat"])
def tokenizer(request):
    found = tiny_tokenizer(400)
    found.chat_template = request.param
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_needles_stand_where_they_are_said_to(tokenizer, kind):
    task = make_task(tokenizer, document(tokenizer), kind, 1500, 0.3, 0)
    told = [tokenizer.decode(task.tokens[start:stop]) for start, stop in task.needles]
    expected = {"single": 1, "multi_key": 1, "multi_value": 3, "variable_tracking": 4}[kind]
    assert len(task.answers) == expected
    for answer, text in zip(task.answers, told, strict=True):
        assert answer in text
    assert tokenizer.decode(task.answer_tokens) == " " + ", ".join(task.answers)
    text = tokenizer.decode(task.tokens)
    assert all(answer in text for answer in task.answers)
    assert 1400 < len(task.tokens) + len(task.answer_tokens) <= 1500
    assert task.document_index == 3
    assert set(task.needle_tokens().tolist()) == {i for a, b in task.needles for i in range(a, b)}


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_depth(depth):
    tokenizer = tiny_tokenizer(400)
    task = make_task(tokenizer, document(tokenizer), "single", 1500, depth, 0)
    assert task.needles[0][0] / len(task.tokens) == pytest.approx(depth, abs=0.12)


def test_the_haystack_is_the_document():
    tokenizer = tiny_tokenizer(400)
    text = tokenizer.decode(make_task(tokenizer, document(tokenizer), "multi_key", 1500, 0.5, 0).tokens)
    body = text.removeprefix(needles.OPENING).rpartition("\n\n")[0]
    kept = [line for line in body.splitlines() if "secret number" not in line]
    assert len(kept) > 20
    assert "\n".join(kept) + "\n" == TEXT[: len("\n".join(kept)) + 1]
    assert len(body.splitlines()) - len(kept) == needles.KEYS


def test_only_the_key_asked_for_counts():
    tokenizer = tiny_tokenizer(400)
    task = make_task(tokenizer, document(tokenizer), "multi_key", 1500, 0.5, 0)
    text = tokenizer.decode(task.tokens)
    key = text.rpartition("What is the secret number of the ")[2].split()[0]
    assert f"The secret number of the {key} is {task.answers[0]}." in text


def test_the_same_seed_gives_the_same_task_and_another_does_not():
    tokenizer = tiny_tokenizer(400)
    ids = [make_task(tokenizer, document(tokenizer), "single", 1000, 0.5, seed).id for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]


def test_a_text_without_lines():
    tokenizer = tiny_tokenizer(400)
    task = make_task(tokenizer, document(tokenizer, "word " * 3000), "single", 800, 0.5, 0)
    assert 0.3 < task.needles[0][0] / len(task.tokens) < 0.7


@pytest.mark.parametrize(
    ("answers", "text", "expected"),
    [
        (["12345"], " 12345.", 1),
        (["12345"], " 123456", 0),
        (["12345"], "it is 1234", 0),
        (["1", "2", "3"], "3, 1", 2 / 3),
        (["COMET"], "a COMET!", 1),
        (["COMET"], "COMETS", 0),
    ],
)
def test_scores(answers, text, expected):
    assert score(answers, text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kinds": ["double"]}, "tasks='double'"),
        ({"lengths": [0]}, "lengths=0"),
        ({"lengths": [4096]}, "data.length=2048"),
        ({"lengths": [True]}, "lengths=True"),
        ({"depths": [1.5]}, "depths=1.5"),
        ({"depths": ["a"]}, "depths='a'"),
    ],
)
def test_bad_options(options, named):
    with pytest.raises(ValueError, match=named):
        needles.check_options(**{"kinds": ["single"], "lengths": [100], "depths": [0.5], "longest": 2048, **options})


def test_too_short_for_the_question():
    tokenizer = tiny_tokenizer(400)
    with pytest.raises(ValueError, match="too short for the question"):
        make_task(tokenizer, document(tokenizer), "multi_value", 60, 0.5, 0)


def test_a_slow_tokenizer():
    with pytest.raises(ValueError, match="fast tokenizer"):
        make_task(object(), document(tiny_tokenizer(400)), "single", 100, 0.5, 0)
