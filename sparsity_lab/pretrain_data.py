"""What a model is trained on: a byte-level BPE tokenizer of the same text, packed streams, and the batches of a step.

A batch depends on the seed and the step alone, so a resumed training sees what an unbroken one would have seen. Three
kinds of sequences share it: code, prose, and (declared as such) code into which random token spans are written twice,
far apart, from which copying over long distances is learned.

Shapes: b sequences of a step, t tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsity_lab.pretrain_text import TextFile

END = "<|endoftext|>"
KINDS = ("code", "prose", "repeats")
IGNORE = -100  # a target that counts nothing
SLOT = 128  # tokens; a repeated span lies within one slot


def train_tokenizer(files: Iterable[TextFile], vocab_size: int, max_bytes: int) -> Any:
    """A byte-level BPE tokenizer as transformers has it, trained on the first `max_bytes` of text. Digits stand alone.

    Raises:
        ValueError: a vocabulary too small for the 256 bytes, or larger than the text gives.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 300:
        raise ValueError(f"vocab_size={vocab_size}: must be at least 300, the bytes and some merges")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_first(files, max_bytes), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size={vocab_size}: the text gives only {tokenizer.get_vocab_size()} tokens")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def _first(files: Iterable[TextFile], max_bytes: int) -> Iterable[str]:
    left = max_bytes
    for file in files:
        if left <= 0:
            return
        left -= file.size
        yield file.text


def token_bytes(tokenizer: Any) -> np.ndarray:
    """Bytes of text that each token stands for, int64 [vocab]; the end of a text stands for none."""
    from tokenizers.pre_tokenizers import ByteLevel

    assert len(ByteLevel.alphabet()) == 256  # one character of a token's name is one byte
    sizes = np.zeros(len(tokenizer), dtype=np.int64)
    for name, index in tokenizer.get_vocab().items():
        sizes[index] = 0 if name == END else len(name)
    return sizes


def encode_files(tokenizer: Any, files: Sequence[TextFile]) -> np.ndarray:
    """All files as one stream, each followed by the end-of-text token: int32 [n]."""
    end = np.array([tokenizer.eos_token_id], dtype=np.int32)
    parts: list[np.ndarray] = []
    for first in range(0, len(files), 512):
        batch = tokenizer.backend_tokenizer.encode_batch(
            [file.text for file in files[first : first + 512]], add_special_tokens=False
        )
        for encoding in batch:
            parts += [np.asarray(encoding.ids, dtype=np.int32), end]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


@dataclass
class Batches:
    """Sequences of every step.

    Args:
        streams: kind (code, prose) -> tokens int32 [n].
        shares: kind (those, and repeats) -> its share of the sequences; they add up to 1.
        sequences: b, over all processes; length: t.
        rank, world: this process takes every `world`-th sequence of a step.
    Raises:
        ValueError: shares that do not add up, or a stream that is too short.
    """

    streams: Mapping[str, np.ndarray]
    shares: Mapping[str, float]
    sequences: int
    length: int
    vocab_size: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    _orders: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.shares) - set(KINDS)
        if unknown or abs(sum(self.shares.values()) - 1) > 1e-6 or min(self.shares.values()) < 0:
            raise ValueError(f"data.shares={dict(self.shares)}: {', '.join(KINDS)} must add up to 1")
        for kind, share in self.shares.items():
            have = len(self._stream(kind))
            if share and have < 2 * self.length + 1:
                raise ValueError(f"data.shares.{kind}={share}: only {have} tokens, sequences have {self.length}")
        if self.sequences % self.world:
            raise ValueError(f"recipe.sequences={self.sequences}: must be divisible by the {self.world} processes")

    def _stream(self, kind: str) -> np.ndarray:
        return self.streams["code" if kind == "repeats" else kind]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (IGNORE where there is nothing to learn) of a step, int64 [b of this process, t]."""
        drawn = [
            (kind, number) for kind in KINDS for number in range(self._before(kind, step), self._before(kind, step + 1))
        ]
        rows = [self._sequence(kind, number) for kind, number in drawn[self.rank :: self.world]]
        inputs, targets = zip(*rows, strict=True)
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))

    def _before(self, kind: str, step: int) -> int:
        """How many sequences of a kind the steps before this one have used; code takes what the others leave."""
        if kind != "code":
            return int(self.shares.get(kind, 0.0) * self.sequences * step + 1e-9)
        return self.sequences * step - sum(self._before(other, step) for other in KINDS if other != "code")

    def _sequence(self, kind: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A stream is gone through whole, from another offset and in another order each time round."""
        stream = self._stream(kind)
        per_round = (len(stream) - 1) // self.length - 1
        time_round, place = divmod(number, per_round)
        key = (kind, time_round)
        if key not in self._orders:
            generator = np.random.default_rng([self.seed, KINDS.index(kind), time_round])
            offset = generator.integers(self.length, size=1)
            self._orders[key] = np.concatenate([offset, generator.permutation(per_round)])
        start = int(self._orders[key][0]) + int(self._orders[key][1 + place]) * self.length
        piece = stream[start : start + self.length + 1].astype(np.int64)
        if kind != "repeats":
            return piece[:-1], piece[1:]
        piece, first = write_repeats(piece, self.vocab_size, np.random.default_rng([self.seed, 99, number]))
        return piece[:-1], np.where(first, IGNORE, piece)[1:]


def write_repeats(
    tokens: np.ndarray, vocab_size: int, generator: np.random.Generator, slot: int = SLOT
) -> tuple[np.ndarray, np.ndarray]:
    """Write random spans over a third of the tokens, each twice: (tokens, where the first of the two stand)."""
    slots = len(tokens) // slot
    pairs = max(1, slots // 6) if slots >= 2 else 0
    places = np.sort(generator.choice(slots, size=2 * pairs, replace=False).reshape(pairs, 2), axis=1)
    out, first = tokens.copy(), np.zeros(len(tokens), dtype=bool)
    for a, b in places:
        size = int(generator.integers(slot // 4, slot + 1))
        span = generator.integers(1, vocab_size, size=size)  # 0 is the end of a text
        out[a * slot : a * slot + size] = span
        out[b * slot : b * slot + size] = span
        first[a * slot : a * slot + size] = True
    return out, first
