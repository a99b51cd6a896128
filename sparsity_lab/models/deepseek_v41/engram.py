"""Engram: hashed n-gram tables whose rows are added to the residual streams.

Shapes: b batch, s tokens, c stream copies, d hidden size, o n-gram orders (2 … max_ngram_size), m hash heads.
Source: Engram (arXiv 2601.07372) as configured in DeepSeek V4.1, where tables sit before the attention of two layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsity_lab.models.deepseek_v41.cache import Cache
from sparsity_lab.models.deepseek_v41.config import DeepseekV41Config, EngramConfig

LAYER_SEED = 10007
GATE_FLOOR = 1e-6


def _is_prime(number: int) -> bool:
    """Miller-Rabin with bases that decide every number below 3.3e24."""
    small = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    if number < 2 or any(number % p == 0 for p in small):
        return number in small
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for base in small:
        x = pow(base, (number - 1) >> twos, number)
        if x not in (1, number - 1) and all((x := x * x % number) != number - 1 for _ in range(twos - 1)):
            return False
    return True


def bucket_primes(config: EngramConfig) -> list[list[list[int]]]:
    """Bucket counts [layer][order][head]: for every order the next primes from `vocab_size` on, none used twice."""
    used: set[int] = set()
    layers = []
    for _ in config.layer_ids:
        orders = []
        for _ in range(config.max_ngram_size - 1):
            heads: list[int] = []
            number = config.vocab_size
            while len(heads) < config.n_heads:
                if number not in used and _is_prime(number):
                    used.add(number)
                    heads.append(number)
                number += 1
            orders.append(heads)
        layers.append(orders)
    return layers


def multipliers(config: EngramConfig) -> Tensor:
    """Odd factors int64 [layers, max_ngram_size], small enough that factor · id stays within int64."""
    bound = max(1, np.iinfo(np.int64).max // config.compressed_vocab_size // 2)
    draws = [np.random.default_rng(LAYER_SEED * i).integers(0, bound, config.max_ngram_size) for i in config.layer_ids]
    return torch.from_numpy(np.stack(draws) * 2 + 1)


def compressed_token_map(tokenizer: Any, config: DeepseekV41Config) -> Tensor:
    """Token -> hashed id, int64 [vocab_size]: tokens that read alike (case, accents, spacing aside) share one.

    Raises:
        ValueError: no fast tokenizer, or one that does not give the configuration's number of ids, with which every
            n-gram would look up a wrong row.
    """
    from tokenizers import Regex, normalizers

    engram: Any = config.engram
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("engram tables need the checkpoint's own fast tokenizer, and there is none")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size}: the checkpoint's tokenizer has {len(tokenizer)} tokens")
    lone = "\ue000"  # a private character, so that a token of a single space survives stripping
    normal = normalizers.Sequence(
        [
            normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), lone),
            normalizers.Strip(), normalizers.Replace(lone, " "),
        ]
    )  # fmt: skip
    ids: dict[str, int] = {}
    line = torch.zeros(config.vocab_size, dtype=torch.int64)
    for token in range(len(tokenizer)):
        text = backend.decode([token], skip_special_tokens=False)
        # a piece of a UTF-8 character has no text to normalise
        key = backend.id_to_token(token) if "\ufffd" in text else normal.normalize_str(text) or text
        line[token] = ids.setdefault(key, len(ids))
    if len(ids) != engram.compressed_vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size={engram.compressed_vocab_size}: this tokenizer gives {len(ids)} ids"
        )
    return line


class NgramHash(nn.Module):
    """Table rows of the n-grams that end at each token.

    An n-gram's hash is the exclusive or of id · factor over its tokens, modulo the bucket's prime. Ids before the first
    token are the pad token's.

    Raises:
        ValueError: table sizes that are not the sums of the primes, or a token map that does not fit.
    """

    def __init__(self, config: EngramConfig, vocab_size: int, token_map: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        primes = torch.tensor(bucket_primes(config))  # [layers, orders, heads]
        expected = primes.flatten(1).sum(-1).tolist()
        if list(config.num_embeddings) != expected:
            raise ValueError(
                f"engram_num_embeddings={list(config.num_embeddings)}: engram_vocab_size={config.vocab_size} with "
                f"{config.n_heads} heads and n-grams up to {config.max_ngram_size} gives {expected}"
            )
        token_map = torch.arange(vocab_size) if token_map is None else token_map
        if token_map.shape != (vocab_size,) or int(token_map.max()) >= config.compressed_vocab_size:
            raise ValueError(
                f"token_map {list(token_map.shape)} with ids up to {int(token_map.max())}: must map {vocab_size} "
                f"tokens to ids below engram_compressed_vocab_size={config.compressed_vocab_size}"
            )
        flat = primes.flatten(1)
        self.token_map: Tensor
        self.primes: Tensor
        self.offsets: Tensor
        self.factors: Tensor
        self.register_buffer("token_map", token_map.long(), persistent=False)
        self.register_buffer("primes", primes, persistent=False)
        self.register_buffer("offsets", flat.cumsum(-1) - flat, persistent=False)
        self.register_buffer("factors", multipliers(config), persistent=False)

    def forward(self, input_ids: Tensor, cache: Cache) -> Tensor:
        """input_ids [b, s], behind the cache's tokens -> table rows int64 [b, s, layers, orders · heads]."""
        size = self.config.max_ngram_size
        ids = self.token_map[input_ids]
        before = cache.tokens
        if before is None:
            before = ids.new_full((ids.shape[0], size - 1), int(self.token_map[self.config.pad_token_id]))
        line = torch.cat([before, ids], dim=1)
        cache.tokens = line[:, line.shape[1] - (size - 1) :].clone()
        grams = line.unfold(1, size, 1).flip(-1)  # [b, s, size], the newest token first
        products = grams.unsqueeze(2) * self.factors
        mixed, rows = products[..., 0], []
        for order in range(1, size):
            mixed = mixed ^ products[..., order]
            rows.append(mixed.unsqueeze(-1) % self.primes[:, order - 1])
        return torch.cat(rows, dim=-1) + self.offsets


class Engram(nn.Module):
    """One table: looked-up rows become a key per stream copy and one value, added as far as stream and key agree."""

    def __init__(self, config: DeepseekV41Config, index: int) -> None:
        super().__init__()
        engram: Any = config.engram
        self.index, self.eps, self.copies = index, config.rms_norm_eps, config.hc_mult
        columns = (engram.max_ngram_size - 1) * engram.n_heads
        self.embed = nn.Embedding(engram.num_embeddings[index], engram.head_dim)
        self.wkv = nn.Linear(columns * engram.head_dim, (config.hc_mult + 1) * config.hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(config.hc_mult, config.hidden_size))

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """streams [b, s, c, d], rows int64 [b, s, layers, columns] -> [b, s, c, d]."""
        found = self.wkv(self.embed(rows[:, :, self.index]).flatten(-2)).unflatten(-1, (self.copies + 1, -1)).float()
        key, value = found[..., :-1, :], found[..., -1:, :]
        wide = streams.float()
        norms = torch.rsqrt(wide.square().mean(-1) + self.eps) * torch.rsqrt(key.square().mean(-1) + self.eps)
        match = (wide * self.q_weight.float() * self.k_weight.float() * key).sum(-1) * norms * wide.shape[-1] ** -0.5
        gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(GATE_FLOOR).sqrt(), match))
        return (wide + gate.unsqueeze(-1) * value).to(streams.dtype)
