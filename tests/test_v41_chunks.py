"""One call, any chunks and token by token give the same logits and selections; batches; caches that went wrong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from v41_cases import NAMES, UNQUANTISED, cached, golden_io, golden_model, prompt, random_tiny, run_in_pieces

from sparsity_lab.models.deepseek_v41 import Cache, DeepseekV41Model

LENGTH = 33
# the goldens' margins keep decisions and roundings apart; random weights have none, so there without quantisation,
# where differences in the last bit stay in the last bit
TOLERANCE = {"rtol": 0, "atol": 2e-5}
DECISIONS = ("topk", "candidates", "experts.")


@pytest.fixture(scope="module")
def model() -> DeepseekV41Model:
    return random_tiny(**UNQUANTISED)


@pytest.fixture(scope="module")
def whole(model):
    return run_in_pieces(model, prompt(LENGTH), [])


def assert_same(got, want) -> None:
    """Logits and everything computed on the way within tolerance, selections and caches' lengths exactly."""
    (logits, trace, held), (logits_whole, trace_whole, held_whole) = got, want
    torch.testing.assert_close(logits, logits_whole, **TOLERANCE)
    assert set(trace) == set(trace_whole)
    for name, tensor in (trace_whole | cached(held_whole)).items():
        found = (trace | cached(held))[name]
        if name.startswith(DECISIONS):
            assert torch.equal(found, tensor), name
        else:
            torch.testing.assert_close(found, tensor, **TOLERANCE, msg=lambda m, name=name: f"{name}: {m}")
    assert held.length == held_whole.length
    for layer, window in held_whole.windows.items():
        torch.testing.assert_close(held.windows[layer].kv, window.kv, **TOLERANCE)
    assert {i: state.pending for i, state in held.groups.items()} == {
        i: state.pending for i, state in held_whole.groups.items()
    }


def test_the_prompt_exercises_selection(whole):
    _, trace, _ = whole
    assert {name for name in trace if name.startswith(("topk", "cand"))} == {
        "topk.L2", "topk.L4", "topk.L6", "candidates.L4",
    }  # fmt: skip
    assert trace["topk.L6"].sum(-1).max() == 16, "of up to 33"
    assert trace["candidates.L4"][0, -1].sum() < LENGTH, "the pool leaves some out"
    assert not torch.equal(trace["topk.L4"], trace["topk.L6"])


@pytest.mark.parametrize("split", range(1, LENGTH))
def test_every_split_point(model, whole, split):
    assert_same(run_in_pieces(model, prompt(LENGTH), [split]), whole)


def test_token_by_token(model, whole):
    assert_same(run_in_pieces(model, prompt(LENGTH), range(1, LENGTH)), whole)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, LENGTH), max_size=6))
def test_random_chunks(model, whole, cuts):
    assert_same(run_in_pieces(model, prompt(LENGTH), cuts), whole)


@pytest.mark.parametrize("name", NAMES)
def test_every_split_point_of_the_quantised_goldens(name):
    model, ids = golden_model(name), golden_io(name)["input_ids"]
    want = run_in_pieces(model, ids, [])
    for split in range(1, ids.shape[1]):
        assert_same(run_in_pieces(model, ids, [split]), want)


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(NAMES), cuts=st.lists(st.integers(0, 31), max_size=5))
def test_random_chunks_of_the_quantised_goldens(name, cuts):
    model, ids = golden_model(name), golden_io(name)["input_ids"]
    cuts = [cut for cut in cuts if cut < ids.shape[1]]
    assert_same(run_in_pieces(model, ids, cuts), run_in_pieces(model, ids, []))


@torch.inference_mode()
def test_attending_to_everything_is_the_same_in_chunks(model):
    ids, held = prompt(LENGTH), Cache()
    parts = [model(piece, held, dense=True) for piece in ids.tensor_split([3, 4, 20], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, dense=True), **TOLERANCE)


@pytest.mark.parametrize("cuts", [[], [7, 8]])
def test_a_batch_equals_its_sequences_alone(model, cuts):
    ids = prompt(LENGTH, batch=3, seed=5)
    logits, trace, _ = run_in_pieces(model, ids, cuts)
    for b in range(3):
        alone, alone_trace, _ = run_in_pieces(model, ids[b : b + 1], cuts)
        torch.testing.assert_close(logits[b : b + 1], alone, **TOLERANCE)
        for name in (name for name in trace if name.startswith(DECISIONS)):
            assert torch.equal(trace[name][b : b + 1], alone_trace[name]), name


@torch.inference_mode()
def test_later_tokens_do_not_change_earlier_logits(model):
    ids, other = prompt(LENGTH), prompt(LENGTH, seed=9)
    other[:, :20] = ids[:, :20]
    torch.testing.assert_close(model(other)[:, :20], model(ids)[:, :20], **TOLERANCE)


@torch.inference_mode()
def test_logits_of_the_last_token_alone(model):
    ids = prompt(LENGTH)
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1:], **TOLERANCE)


# --- what is refused --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_call_that_fails_half_way_spoils_the_cache(model):
    held = Cache()
    model(prompt(5), held)

    def fail(*args):
        raise RuntimeError("out of memory")

    handle = model.model.layers[3].ffn.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            model(prompt(5), held)
    finally:
        handle.remove()
    with pytest.raises(ValueError, match="an earlier call with it failed half way; start anew"):
        model(prompt(5), held)
    model(prompt(5), Cache())


@torch.inference_mode()
def test_refused_input_leaves_the_cache_as_it_was(model):
    held, ids = Cache(), prompt(9)
    model(ids[:, :5], held)
    refused = {
        "batch=2: the cache holds 1 sequences": {"input_ids": prompt(2, batch=2)},
        "padded batches are not supported": {"input_ids": ids, "attention_mask": torch.tensor([[0] + [1] * 8])},
        r"input_ids torch.int64 \[1, 0\]: must be whole numbers": {"input_ids": ids[:, :0]},
        r"input_ids torch.int64 \[0, 9\]: must be whole numbers": {"input_ids": ids[:0]},
        r"input_ids torch.int64 \[9\]: must be": {"input_ids": ids[0]},
        r"input_ids torch.float32 \[1, 9\]: must be whole numbers": {"input_ids": ids.float()},
        "input_ids 0 to 384: the vocabulary has 0 to 383": {"input_ids": torch.tensor([[0, 384]])},
        "input_ids -1 to 3: the vocabulary has 0 to 383": {"input_ids": torch.tensor([[-1, 3]])},
        "observer: needs a whole prompt, but the cache holds 5": {"input_ids": ids, "observer": lambda acts: None},
    }
    for message, arguments in refused.items():
        with pytest.raises(ValueError, match=message):
            model(**arguments, cache=held)
    rest = model(ids[:, 5:], held, attention_mask=torch.ones(1, 4))
    torch.testing.assert_close(rest, model(ids)[:, 5:], **TOLERANCE)


def test_only_sources_select_and_compress(model):
    topology = model.config.topology
    for layer, block in enumerate(model.model.layers):
        assert (block.attn.indexer is not None) == (layer in topology.index_source_layers)
        assert (block.attn.compressor is not None) == (layer in topology.kv_source_layers)


def test_the_caches_memory_is_that_of_windows_and_compressed_keys(model):
    _, _, held = run_in_pieces(model, prompt(LENGTH), [20])
    assert {layer: window.kv.shape[1] for layer, window in held.windows.items()} == dict.fromkeys(range(8), 15)
    assert {layer: keys.length for layer, keys in held.compressed.items()} == {2: 16, 4: 33}
    assert {layer: keys.length for layer, keys in held.index.keys.items()} == {2: 16, 4: 33}
    assert all(w.kv.untyped_storage().nbytes() == w.kv.numel() * 4 for w in held.windows.values()), "no views"
