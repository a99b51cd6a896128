"""N-gram tables: the published sizes, hashing against a scalar loop, the gate against a loop, the token map."""

import dataclasses

import naive_v41
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v41_cases import prompt, random_tiny, run_in_pieces, tiny_config

from sparsity_lab.models.deepseek_v41 import Cache, DeepseekV41Config
from sparsity_lab.models.deepseek_v41.config import EngramConfig
from sparsity_lab.models.deepseek_v41.engram import NgramHash, bucket_primes, compressed_token_map, multipliers

PUBLISHED = EngramConfig(
    layer_ids=(1, 14), num_embeddings=(384006168, 384016682), head_dim=256, n_heads=8, max_ngram_size=4,
    vocab_size=16_000_000, pad_token_id=2, compressed_vocab_size=99000,
)  # fmt: skip
SMALL = EngramConfig(
    layer_ids=(1, 3), num_embeddings=(0, 0), head_dim=8, n_heads=2, max_ngram_size=3, vocab_size=50, pad_token_id=7,
    compressed_vocab_size=384,
)  # fmt: skip
SMALL = dataclasses.replace(SMALL, num_embeddings=tuple(sum(map(sum, layer)) for layer in bucket_primes(SMALL)))


def is_prime(number: int) -> bool:
    return number > 1 and all(number % p for p in range(2, int(number**0.5) + 1))


def test_published_table_sizes():
    primes = bucket_primes(PUBLISHED)
    assert [sum(map(sum, layer)) for layer in primes] == [384006168, 384016682]
    assert [[len(heads) for heads in layer] for layer in primes] == [[8, 8, 8], [8, 8, 8]]


@pytest.mark.parametrize("config", [PUBLISHED, SMALL])
def test_buckets_are_the_next_unused_primes(config):
    flat = [p for layer in bucket_primes(config) for heads in layer for p in heads]
    assert len(set(flat)) == len(flat)
    assert flat == [p for p in range(config.vocab_size, max(flat) + 1) if is_prime(p)]


def test_multipliers_are_odd_and_do_not_overflow():
    factors = multipliers(PUBLISHED)
    assert factors.shape == (2, 4)
    assert factors.dtype == torch.int64
    assert bool((factors % 2 == 1).all())
    assert int(factors.max()) * (PUBLISHED.compressed_vocab_size - 1) < 2**63
    assert int(factors.max()) > 2**40, "and use the room there is"
    assert torch.equal(factors, multipliers(PUBLISHED))
    assert len(factors.unique()) == factors.numel()
    alone = multipliers(dataclasses.replace(PUBLISHED, layer_ids=(14,)))
    assert torch.equal(alone[0], factors[1]), "they depend on the layer's number, not on its place in the list"


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(0, 383), min_size=1, max_size=12),
    order=st.integers(2, 4),
    cuts=st.lists(st.integers(1, 11), max_size=4),
)
def test_hash_against_a_scalar_loop_in_any_chunks(ids, order, cuts):
    config = dataclasses.replace(SMALL, max_ngram_size=order)
    primes = bucket_primes(config)
    config = dataclasses.replace(config, num_embeddings=tuple(sum(map(sum, layer)) for layer in primes))
    token_map = (torch.arange(384) * 5) % 200
    ngrams, cache = NgramHash(config, 384, token_map), Cache()
    tokens = torch.tensor([ids, ids[::-1]])
    rows = torch.cat([ngrams(piece, cache) for piece in tokens.tensor_split(sorted(cuts), 1) if piece.numel()], dim=1)
    mapped, pad = token_map[tokens].tolist(), int(token_map[config.pad_token_id])
    for layer, factors in enumerate(multipliers(config).tolist()):
        for b in range(2):
            assert rows[b, :, layer].tolist() == naive_v41.ngram_rows(mapped[b], pad, factors, primes[layer])
    assert int(rows.min()) >= 0
    assert bool((rows.amax((0, 1, 3)) < torch.tensor(config.num_embeddings)).all())


def test_large_ids_and_published_factors_against_python_integers():
    ids = [98999, 98998, 0, 98999, 12345]
    ngrams = NgramHash(PUBLISHED, 99000)
    primes, factors = bucket_primes(PUBLISHED), multipliers(PUBLISHED).tolist()
    rows = ngrams(torch.tensor([ids]), Cache())
    for layer in range(2):
        assert rows[0, :, layer].tolist() == naive_v41.ngram_rows(ids, 2, factors[layer], primes[layer])


def test_every_head_has_rows_of_its_own():
    ngrams = NgramHash(SMALL, 384)
    rows = ngrams(prompt(200), Cache())
    for layer, orders in enumerate(bucket_primes(SMALL)):
        flat, first = [p for heads in orders for p in heads], 0
        for column, prime in enumerate(flat):
            inside = rows[0, :, layer, column]
            assert int(inside.min()) >= first
            assert int(inside.max()) < first + prime
            first += prime


def test_sizes_that_are_not_those_of_the_primes():
    wrong = dataclasses.replace(SMALL, num_embeddings=(SMALL.num_embeddings[0] + 1, SMALL.num_embeddings[1]))
    with pytest.raises(ValueError, match=r"engram_num_embeddings=\[2\d+, \d+\].*gives \[2\d+, \d+\]"):
        NgramHash(wrong, 384)
    with pytest.raises(ValueError, match=r"token_map \[300\].*must map 384 tokens"):
        NgramHash(SMALL, 384, torch.zeros(300))
    with pytest.raises(ValueError, match="ids below engram_compressed_vocab_size=384"):
        NgramHash(SMALL, 384, torch.full((384,), 384))


@pytest.fixture(scope="module")
def model():
    return random_tiny(engram=SMALL, window_quant="none", kv_quant="none", index_quant="none")


@torch.inference_mode()
def test_gate_against_a_loop(model):
    layer = model.model.layers[1].engram
    streams, rows = torch.randn(1, 4, 4, 64), model.hash(prompt(4), Cache())
    got = layer(streams, rows)
    for s in range(4):
        entries = torch.cat([layer.embed.weight[row] for row in rows[0, s, layer.index]])
        want = naive_v41.engram(streams[0, s], entries, layer, model.config.rms_norm_eps)
        torch.testing.assert_close(got[0, s], want.float(), rtol=0, atol=5e-6)
    assert (got - streams).abs().max() > 0.1


def test_layers_have_their_own_tables(model):
    found = [i for i, block in enumerate(model.model.layers) if block.engram is not None]
    assert found == [1, 3]
    assert [model.model.layers[i].engram.index for i in found] == [0, 1]
    assert [model.model.layers[i].engram.embed.num_embeddings for i in found] == list(SMALL.num_embeddings)


@pytest.mark.parametrize("cuts", [[1], [2], [3], [5, 6], list(range(1, 14))])
def test_a_model_with_tables_is_the_same_in_chunks(model, cuts):
    ids = prompt(14, batch=2)
    want, _, _ = run_in_pieces(model, ids, [])
    got, _, _ = run_in_pieces(model, ids, cuts)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_tables_change_the_logits_and_see_the_order_of_tokens(model):
    ids = prompt(14)
    with_tables, _, _ = run_in_pieces(model, ids, [])
    saved = model.hash.token_map.clone()
    model.hash.token_map.zero_()  # all n-grams alike
    try:
        without, _, _ = run_in_pieces(model, ids, [])
    finally:
        model.hash.token_map.copy_(saved)
    assert (with_tables - without).abs().max() > 0.01


# --- the map from tokens to ids ---------------------------------------------------------------------------------------

WORDS = ["<pad>", "the", "The", "THE", "thé", " the", "  the", "\tthe", " ", "\n", "  ", "cat", "Cat", "ﬁ", "fi"]
IDS = [0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]


def tokenizer_of(words: list[str]):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def config_for(vocab_size: int, ids: int) -> DeepseekV41Config:
    return tiny_config(vocab_size=vocab_size, engram=dataclasses.replace(SMALL, compressed_vocab_size=ids))


def test_case_accents_and_spacing_share_an_id():
    line = compressed_token_map(tokenizer_of(WORDS), config_for(len(WORDS), 5))
    assert line.dtype == torch.int64
    assert line.tolist() == IDS, dict(zip(WORDS, line.tolist(), strict=True))


def test_vocabulary_rows_without_a_token():
    line = compressed_token_map(tokenizer_of(WORDS), config_for(len(WORDS) + 3, 5))
    assert line.tolist() == [*IDS, 0, 0, 0]


def test_pieces_of_characters_keep_apart():
    from tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(vocab_size=257)  # a token a byte: most of those above 127 are no characters alone
    high = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.backend_tokenizer.decode([i])]
    assert len(high) > 100
    with pytest.raises(ValueError, match="engram_compressed_vocab_size=5: this tokenizer gives") as caught:
        compressed_token_map(tokenizer, config_for(257, 5))
    line = compressed_token_map(tokenizer, config_for(257, int(str(caught.value).split()[-2])))
    assert len(line[high].unique()) == len(high)


def test_tokenizers_that_do_not_fit():
    with pytest.raises(ValueError, match="engram_compressed_vocab_size=6: this tokenizer gives 5 ids"):
        compressed_token_map(tokenizer_of(WORDS), config_for(len(WORDS), 6))
    with pytest.raises(ValueError, match="fast tokenizer, and there is none"):
        compressed_token_map(None, config_for(len(WORDS), 5))
    with pytest.raises(ValueError, match=r"vocab_size=10.* 15"):
        compressed_token_map(tokenizer_of(WORDS), config_for(10, 5))
