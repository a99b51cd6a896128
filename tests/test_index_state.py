"""What index layers share, and the calls and options an indexer refuses."""

import dataclasses

import pytest
import torch
from index_stack import DIM, LENGTH, RANK, ROPE, TABLE, V41, WIDTH, Stack, make, random_inputs

from sparsity_lab.index_state import CandidatePool, IndexRole, KeyCache, SharedIndexState
from sparsity_lab.indexer import Indexer


@pytest.fixture
def inputs():
    return random_inputs()


def test_key_cache_grows_and_returns_what_was_appended():
    cache, keys = KeyCache(), torch.randn(2, 50, 4)
    assert cache.view() is None
    for piece in keys.split([1, 1, 5, 2, 30, 11], dim=1):
        cache.append(piece.clone())
    assert torch.equal(cache.view(), keys)
    with pytest.raises(ValueError, match="the cache holds"):
        cache.append(torch.randn(1, 2, 4))
    first = torch.randn(1, 2, 4)
    other, kept = KeyCache(), first.clone()
    other.append(first)
    other.append(torch.randn(1, 3, 4))
    assert torch.equal(first, kept), "the caller's tensor is not written to"


def test_pool_mask_of_rows_and_partial_last_block():
    blocks = torch.tensor([[[0, 2], [1, -1], [-1, -1]]], dtype=torch.int32)
    pool = CandidatePool(blocks, width=5, block_size=2, start_pos=0, owner=0, ratio=1)
    assert pool.mask().int().tolist() == [[[1, 1, 0, 0, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]]
    assert torch.equal(pool.mask(slice(1, 3)), pool.mask()[:, 1:3])


def test_stale_or_foreign_shared_state_is_refused(inputs):
    x, qr = inputs
    stack = Stack(1, V41)
    _, state = stack.run(x, qr)
    source, consumer = stack.roles[1], stack.roles[2]
    with pytest.raises(ValueError, match="no candidate pool has been published"):
        SharedIndexState().pool_for(consumer, 0, 4)
    with pytest.raises(ValueError, match="run the candidate source first"):
        state.pool_for(consumer, LENGTH, 1)
    with pytest.raises(ValueError, match="both must be the same"):
        state.pool_for(dataclasses.replace(consumer, ratio=2), 0, LENGTH)
    with pytest.raises(ValueError, match="no index source has selected"):
        state.latest_topk(LENGTH, 1)
    one, one_qr = x[:, :1], qr[:, :1]
    with pytest.raises(ValueError, match="needs 27 keys of layer 0"):  # the owner has not run in this call
        stack.layers[1](one, one_qr, None, LENGTH, TABLE, state, source)


def test_calls_out_of_order_and_wrong_latents_are_refused():
    indexer, role, state = make(), IndexRole(0, 0, 2, 3), SharedIndexState()
    x, qr, latent = torch.randn(1, 6, DIM), torch.randn(1, 6, RANK), torch.randn(1, 3, 12)
    with pytest.raises(ValueError, match="start_pos=4"):
        indexer(x, qr, latent, 4, TABLE, state, role)
    with pytest.raises(ValueError, match="latent: 2 groups given"):
        indexer(x, qr, latent[:, :2], 0, TABLE, state, role)
    with pytest.raises(ValueError, match="latent: 0 groups given"):
        indexer(x, qr, None, 0, TABLE, state, role)
    assert state.keys[0].length == 0, "a refused call leaves the keys as they were"
    indexer(x, qr, latent, 0, TABLE, state, role)
    with pytest.raises(ValueError, match="start_pos=0"):
        indexer(x, qr, latent, 0, TABLE, state, role)
    with pytest.raises(ValueError, match="which reads the keys of layer 0"):
        make(owner=False)(x, qr, latent, 0, TABLE, state, dataclasses.replace(role, layer=1))
    with pytest.raises(ValueError, match="cannot make any"):
        make(owner=False).keys(latent, TABLE[:3])


def test_padding_and_bad_arguments_are_refused():
    indexer, role = make(), IndexRole(0, 0, 1, 3)
    x, qr, latent = torch.randn(2, 6, DIM), torch.randn(2, 6, RANK), torch.randn(2, 6, 12)

    def call(x=x, qr=qr, start_pos=0, table=TABLE, offset=0):
        return indexer(x, qr, latent, start_pos, table, SharedIndexState(), role, offset)

    with pytest.raises(ValueError, match="ragged"):
        call(start_pos=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="start_pos=-1"):
        call(start_pos=-1)
    with pytest.raises(ValueError, match="freqs_cis has 5 rows"):
        call(table=TABLE[:5])
    with pytest.raises(ValueError, match="qr"):
        call(qr=qr[:, :5])
    with pytest.raises(ValueError, match="at least one"):
        call(x=x[:, :0], qr=qr[:, :0])
    with pytest.raises(ValueError, match=r"offset=2147483643.*int32"):
        call(offset=2**31 - 5)
    assert call(offset=2**31 - 6).max() == 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_layout": "neox"}, "rope_layout='neox'"),
        ({"rope_place": "middle"}, "rope_place='middle'"),
        ({"key_norm": "batch"}, "key_norm='batch'"),
        ({"quant": "int8"}, "quant='int8'"),
        ({"quant": "fp8_e4m3_128"}, "index_head_dim=32: must be a multiple of 128"),
    ],
)
def test_bad_constructor_options(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{**V41, **changes})


def test_bad_constructor_dimensions():
    with pytest.raises(ValueError, match="hadamard width=96"):
        make(width=96, **V41, hadamard=True)
    with pytest.raises(ValueError, match="rope_head_dim=8"):
        make(width=4, **V41, quant="none")
    with pytest.raises(ValueError, match="index_n_heads=0"):
        Indexer(DIM, 0, WIDTH, ROPE, RANK, None, 1e-6, **V41)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 0, 0, 4), "compress_ratio=0"),
        ((0, 0, 1, 0), "index_topk=0"),
        ((0, 1, 1, 4), "owner=1"),
        ((0, 0, 1, 4, "both"), "candidate='both'"),
        ((0, 0, 1, 4, "source", 0, 8), "candidate_topk_blocks=0"),
        ((0, 0, 1, 4, "source", 4, 0), "candidate_block_size=0"),
    ],
)
def test_bad_roles(values, message):
    with pytest.raises(ValueError, match=message):
        IndexRole(*values)
