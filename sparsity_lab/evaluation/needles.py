"""Retrieval tasks: facts hidden in real text, a question about them, and where the answer's tokens stand.

The haystack is a document of the run's own data (prose, source code, your files), cut at line ends. What is hidden:

    single             one secret number, asked for
    multi_key          four of them under different names, one asked for
    multi_value        three under one name, all asked for
    variable_tracking  a chain of assignments; which names hold the number?

They are of the kinds of RULER (arXiv 2404.06654), worded anew. Everything follows from the seed and the document.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.documents import Document

KINDS = ("single", "multi_key", "multi_value", "variable_tracking")
KEYS, VALUES, CHAIN = 4, 3, 4  # needles of the kinds that hide several
DIGITS = 5
EXTRA = 8  # tokens that may be generated beyond the length of the expected answer
WORDS = [
    "anvil", "basket", "candle", "canyon", "comet", "copper", "falcon", "glacier", "harbour", "juniper", "lantern",
    "marble", "meadow", "mirror", "orchard", "pigeon", "quarry", "ribbon", "saddle", "teapot", "thunder", "velvet",
    "violin", "walnut",
]  # fmt: skip
OPENING = "Some facts are hidden in the text below. Find and remember them.\n\n"


@dataclass(frozen=True)
class Task:
    """One question. `needles`: token ranges [start, stop) in `tokens` that hold what the answer needs."""

    kind: str
    length: int  # tokens that the prompt and what is generated may take together
    depth: float  # where the (first) needle stands: 0 = at the beginning, 1 = at the end
    document: str  # id of the haystack
    document_index: int
    tokens: Tensor  # int64 [p], the prompt up to where the answer begins
    answer_tokens: Tensor  # int64 [m]
    answers: tuple[str, ...]  # what must appear in what is generated
    needles: tuple[tuple[int, int], ...]

    @property
    def id(self) -> str:
        """16 hex digits of everything that makes the task."""
        parts = [self.kind, self.length, self.depth, self.tokens.tolist(), self.answers, self.answer_tokens.tolist()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def needle_tokens(self) -> Tensor:
        """Positions of all needles, ascending int64 [T]."""
        return torch.tensor(sorted({i for start, stop in self.needles for i in range(start, stop)}))


@dataclass(frozen=True)
class _Wording:
    """The sentences to hide, which of their characters the answer needs, the question and the answer."""

    sentences: tuple[str, ...]
    depths: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]  # (sentence, first character, character after the last)
    question: str
    start: str  # how the answer begins, given to the model
    answer: str
    answers: tuple[str, ...]


def check_options(kinds: Sequence[str], lengths: Sequence[int], depths: Sequence[float], longest: int) -> None:
    """Raises ValueError: an unknown kind, a length that no document can fill, or a depth that is no share."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"evaluation.retrieval.tasks={kind!r}: must be among {', '.join(KINDS)}")
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= longest:
            raise ValueError(
                f"evaluation.retrieval.lengths={length!r}: must be a whole number up to data.length={longest}, whose "
                "documents are the haystacks"
            )
    for depth in depths:
        if isinstance(depth, bool) or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
            raise ValueError(f"evaluation.retrieval.depths={depth!r}: must be between 0 (beginning) and 1 (end)")


def make_task(tokenizer: Any, document: Document, kind: str, length: int, depth: float, seed: int) -> Task:
    """Hide a task of `kind` in the document, prompt and generation within `length` tokens.

    Raises:
        ValueError: a tokenizer without offsets, or a length that question and facts alone exceed.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "evaluation.retrieval: needs a fast tokenizer, one that tells where in the text a token stands"
        )
    wording = _word(kind, depth, random.Random(f"{seed}:{document.id}:{kind}:{length}:{depth}"))
    room = length
    while room > 0:
        text = _haystack(tokenizer, document, room)
        prompt, places = _prompt(tokenizer, text, wording)
        ids, offsets = _encode(tokenizer, prompt + wording.answer)
        over = len(ids) + EXTRA - length
        if over <= 0:
            return _task(wording, kind, length, depth, document, prompt, places, ids, offsets)
        room -= over  # less than that where the text was cut at the same line end again
    raise ValueError(f"evaluation.retrieval.lengths={length}: too short for the question and the facts of {kind} alone")


def _task(
    wording: _Wording, kind: str, length: int, depth: float, document: Document, prompt: str, places: Sequence[int],
    ids: Sequence[int], offsets: Sequence[tuple[int, int]],
) -> Task:  # fmt: skip
    first = next(i for i, (_, stop) in enumerate(offsets) if stop > len(prompt))
    spans = []
    for sentence, start, stop in wording.spans:
        low, high = places[sentence] + start, places[sentence] + stop
        inside = [i for i, (a, b) in enumerate(offsets) if a < high and b > low]
        spans.append((inside[0], inside[-1] + 1))
    return Task(
        kind, length, depth, document.id, document.index, torch.tensor(ids[:first]), torch.tensor(ids[first:]),
        wording.answers, tuple(spans),
    )  # fmt: skip


def _haystack(tokenizer: Any, document: Document, room: int) -> str:
    """The document's first `room` tokens as text, up to a line end where there is one."""
    text = tokenizer.decode(document.tokens[:room], skip_special_tokens=True)
    return text[: text.rfind("\n") + 1] or text


def _prompt(tokenizer: Any, text: str, wording: _Wording) -> tuple[str, list[int]]:
    """The whole prompt, and the character at which each hidden sentence begins."""
    ends = [0, *(match.end() for match in re.finditer("\n", text))]
    ends = ends if len(ends) > 2 else [0, *(match.end() for match in re.finditer(r"\s", text))]
    pieces, at = [], 0
    for sentence, depth in sorted(zip(wording.sentences, wording.depths, strict=True), key=lambda pair: pair[1]):
        place = max(at, min(ends, key=lambda end: abs(end - depth * len(text))))
        pieces += [text[at:place], sentence, "\n"]
        at = place
    asked = OPENING + "".join([*pieces, text[at:]]) + "\n\n" + wording.question
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": asked}]
        whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + wording.start
    else:
        whole = f"{asked}\n{wording.start}"
    return whole, [whole.index(sentence) for sentence in wording.sentences]


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and the characters each stands for. A chat template brings its special tokens along."""
    special = not getattr(tokenizer, "chat_template", None)
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    return found["input_ids"], found["offset_mapping"]


def _word(kind: str, depth: float, draw: random.Random) -> _Wording:
    words = draw.sample(WORDS, KEYS)
    numbers = [str(n) for n in draw.sample(range(10 ** (DIGITS - 1), 10**DIGITS), KEYS)]
    if kind == "variable_tracking":
        return _chain([word.upper() for word in words], numbers[0], depth)
    key, count = words[0], {"single": 1, "multi_key": KEYS, "multi_value": VALUES}[kind]
    keys = words[:count] if kind == "multi_key" else [key] * count
    told = tuple(f"The secret number of the {k} is {n}." for k, n in zip(keys, numbers, strict=False))
    asked = range(count if kind == "multi_value" else 1)
    spans = tuple((i, len(told[i]) - 1 - DIGITS, len(told[i]) - 1) for i in asked)
    answers = tuple(numbers[i] for i in asked)
    some = "numbers" if len(answers) > 1 else "number"
    is_are = "are" if len(answers) > 1 else "is"
    return _Wording(
        told, _spread(depth, count), spans, f"What {is_are} the secret {some} of the {key} in the text above?",
        f"The secret {some} of the {key} {is_are}", " " + ", ".join(answers), answers,
    )  # fmt: skip


def _chain(names: Sequence[str], number: str, depth: float) -> _Wording:
    told = [f"VAR {names[0]} = {number}", *(f"VAR {b} = VAR {a}" for a, b in pairwise(names))]
    return _Wording(
        tuple(told), tuple(depth + (1 - depth) * i / CHAIN for i in range(CHAIN)),
        tuple((i, 0, len(sentence)) for i, sentence in enumerate(told)),
        f"Which variables hold the value {number} in the text above, directly or through others?",
        f"The variables that hold the value {number} are", " " + ", ".join(names), tuple(names),
    )  # fmt: skip


def _spread(depth: float, count: int) -> tuple[float, ...]:
    """The first at `depth`, the others evenly around the text from there."""
    return tuple((depth + i / count) % 1 if i else depth for i in range(count))


def score(answers: Sequence[str], generated: str) -> float:
    """Share of the answers that appear in what was generated as words of their own: 12345 is not in 123456."""
    return sum(re.search(rf"(?<!\w){re.escape(a)}(?!\w)", generated) is not None for a in answers) / len(answers)
