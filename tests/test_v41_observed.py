"""What `DeepseekV41` hands to observers: attention, indexers and selections that can be rebuilt from it; and `load`."""

import dataclasses

import naive_v41
import pytest
import torch
from v41_cases import UNQUANTISED, prompt, random_tiny

from sparsity_lab.index_state import CandidatePool
from sparsity_lab.indexer import index_scores
from sparsity_lab.models.deepseek_v41 import SIZES, Cache, DeepseekV41, load, size_config
from sparsity_lab.models.deepseek_v41.checkpoint import save_checkpoint
from sparsity_lab.selection import adjust_scores, rank_blocks, select_topk

LENGTH = 45
ATTENTIONS = ("native", "dense")


@pytest.fixture(scope="module")
def model():
    return random_tiny()


def observe(model, attention="native", tokens=None, layers=range(8)):
    """Layer -> its activations, tensors copied."""
    found = {}
    observed = DeepseekV41(model, None, name="tiny", fingerprint="0", attention=attention)
    observed.observe(prompt(LENGTH) if tokens is None else tokens, lambda a: found.update({a.layer: a}), layers)
    return found


@pytest.fixture(scope="module")
def activations(model):
    return {attention: observe(model, attention) for attention in ATTENTIONS}


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_output_is_attention_over_what_is_handed_over(model, activations, attention):
    for layer, acts in activations[attention].items():
        ratio = model.config.compress_ratios[layer]
        assert (acts.compressed is None) == (ratio == 0)
        assert (acts.selected is None) == (ratio == 0 or attention == "dense")
        assert acts.scale == 64**-0.5
        compressed = acts.k[:, 0, :0] if acts.compressed is None else acts.compressed.k[:, 0]
        assert compressed.shape[1] == (LENGTH // ratio if ratio else 0)
        want = naive_v41.attend(
            acts.q.transpose(1, 2), acts.k[:, 0], compressed, acts.selected, acts.sink,
            start=0, window_size=acts.window, ratio=ratio,
        )  # fmt: skip
        torch.testing.assert_close(acts.output, want.float(), rtol=0, atol=5e-6)
        assert torch.equal(acts.k, acts.v), "one latent is key and value"
        if acts.compressed is not None:
            assert torch.equal(acts.compressed.k, acts.compressed.v)
            assert acts.compressed.ratio == ratio


def test_shapes_are_those_of_layer_activations(activations):
    for acts in activations["native"].values():
        assert acts.q.shape == (1, 4, LENGTH, 64)
        assert acts.k.shape == (1, 1, LENGTH, 64)
        assert acts.output.shape == (1, LENGTH, 4, 64)
        assert acts.x.shape == (1, LENGTH, 64)
        assert acts.sink.shape == (4,)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_index_activations_reproduce_selection_and_pool(model, activations, attention):
    config, topology = model.config, model.config.topology
    positions, pool = torch.arange(LENGTH), None
    with torch.inference_mode():
        held = Cache()
        model(prompt(LENGTH), held, dense=attention == "dense")
    for layer in topology.index_source_layers:
        acts = activations[attention][layer]
        assert acts.index.layer == layer
        scores = index_scores(acts.index.q, acts.index.k, acts.index.w, acts.index.relu)
        scores = adjust_scores(scores, positions, acts.index.ratio)
        role = topology.candidate_role(layer)
        if role == "source":
            ranks = rank_blocks(scores, (positions + 1) // acts.index.ratio, config.candidate_block_size)
            kept = (ranks < config.candidate_topk_blocks).repeat_interleave(config.candidate_block_size, -1)
            pool = kept[..., : scores.shape[-1]]
            assert isinstance(held.index.pool, CandidatePool)
            assert torch.equal(held.index.pool.mask(), pool)
        picks = select_topk(scores, config.index_topk, pool=pool if role == "consumer" else None)
        if attention == "native":
            assert torch.equal(acts.selected, picks), layer
        elif layer == topology.index_source_layers[-1]:
            assert torch.equal(held.index.topk, picks)


def test_reuse_layers_carry_their_sources_index_and_selection(model, activations):
    topology = model.config.topology
    for attention in ATTENTIONS:
        for layer, acts in activations[attention].items():
            source = topology.index_source(layer)
            assert acts.index is (None if source is None else activations[attention][source].index)
    for layer, acts in activations["native"].items():
        source = topology.index_source(layer)
        if source is not None:
            assert torch.equal(acts.selected, activations["native"][source].selected)
            kv_source = topology.kv_source(layer)
            assert torch.equal(acts.compressed.k, activations["native"][kv_source].compressed.k)


def test_dense_equals_native_where_everything_is_selected():
    model = random_tiny(index_topk=64, candidate_topk_blocks=32)
    native, dense = observe(model, "native"), observe(model, "dense")
    for layer in range(8):
        torch.testing.assert_close(native[layer].output, dense[layer].output, rtol=0, atol=1e-5)


def test_later_layers_see_what_attention_says(activations):
    native, dense = activations["native"], activations["dense"]
    assert torch.equal(native[2].x, dense[2].x), "nothing before layer 2 selects"
    assert torch.equal(native[2].q, dense[2].q)
    assert (native[2].output - dense[2].output).abs().max() > 1e-3
    assert (native[3].x - dense[3].x).abs().max() > 1e-3


def test_observing_some_layers_changes_nothing(model, activations):
    some = observe(model, layers=[5, 3, 3])
    assert list(some) == [3, 5], "in order, once each"
    for layer, acts in some.items():
        assert torch.equal(acts.output, activations["native"][layer].output)
        assert torch.equal(acts.index.q, activations["native"][layer].index.q), "of a source that is not observed"
    assert observe(model, layers=[]) == {}


def test_training_after_observing():
    model = random_tiny(**UNQUANTISED)
    observe(model)
    model.hidden(prompt(9)).sum().backward()
    assert model.model.embed.weight.grad is not None


def test_what_observe_refuses(model):
    for layers in ([8], [-1, 2]):
        with pytest.raises(ValueError, match=rf"layers=\[{layers[0]}\]: tiny has layers 0 to 7"):
            observe(model, layers=layers)
    for tokens in (prompt(4, batch=2), prompt(4)[0]):
        with pytest.raises(ValueError, match=r"must be \[1, t\], one document without padding"):
            observe(model, tokens=tokens)
    with pytest.raises(ValueError, match="input_ids 5 to 999: the vocabulary has 0 to 383"):
        observe(model, tokens=torch.tensor([[5, 999]]))
    with pytest.raises(ValueError, match=r"model\.attention='eager': must be one of native, dense"):
        observe(model, "eager")


# --- load -------------------------------------------------------------------------------------------------------------


def weights(loaded: DeepseekV41) -> dict[str, torch.Tensor]:
    return dict(loaded.model.named_parameters())


def test_load_describes_the_model():
    loaded = load("tiny")
    assert (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads, loaded.hidden_size) == (8, 4, 1, 64)
    assert loaded.max_length == 65536
    assert loaded.windows() == {0: 16, 1: 16, **dict.fromkeys(range(2, 8))}
    assert loaded.native == SIZES["tiny"].native_selection
    where = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    assert (loaded.dtype, loaded.device.type, loaded.attention) == (*where, "native")
    assert not loaded.model.training


def test_same_seed_same_weights_and_fingerprint():
    one, again, other = load(seed=3), load(seed=3), load(seed=4)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    for name, p in weights(one).items():
        assert torch.equal(p, weights(again)[name]), name
    random = [n for n, p in weights(one).items() if p.std() > 0 and "_base" not in n]
    assert len(random) > 100
    assert all(not torch.equal(weights(one)[name], weights(other)[name]) for name in random)
    values = [weights(one)[name].flatten()[:8] for name in random]
    assert len({tuple(v.tolist()) for v in values}) == len(values), "every tensor has draws of its own"


def test_fingerprints_tell_apart_what_changes_numbers():
    kinds = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", **UNQUANTISED}]
    prints = [load(**kind).fingerprint for kind in kinds]
    assert len(set(prints)) == 3
    assert load().fingerprint == load(attention="dense").fingerprint == prints[torch.cuda.is_available()]


def test_quantisation_can_be_switched_off():
    config = load(**UNQUANTISED).model.config
    assert (config.window_quant, config.kv_quant, config.index_quant) == ("none",) * 3
    assert (
        dataclasses.replace(config, window_quant="fp8_ue8m0", kv_quant="fp4_e4m3", index_quant="fp4_ue8m0")
        == (SIZES["tiny"])
    )


def test_random_weights_come_with_a_byte_tokenizer():
    tokenizer = load().tokenizer
    ids = tokenizer("Zoë\n", add_special_tokens=False)["input_ids"]
    assert len(ids) == len("Zoë\n".encode())
    assert len(tokenizer) <= SIZES["tiny"].vocab_size
    assert tokenizer.decode(ids) == "Zoë\n"


def test_load_a_folder(tmp_path, model, caplog):
    save_checkpoint(model, tmp_path / "model")
    loaded = load(path=str(tmp_path / "model"), **UNQUANTISED, attention="dense", name="mine")
    assert (loaded.name, loaded.attention, loaded.tokenizer) == ("mine", "dense", None)
    assert loaded.model.config == dataclasses.replace(model.config, **UNQUANTISED)
    assert torch.equal(weights(loaded)["lm_head.weight"].cpu(), model.lm_head.weight.to(loaded.dtype))
    assert load(path=str(tmp_path / "model")).fingerprint != loaded.fingerprint
    save_checkpoint(random_tiny(seed=1), tmp_path / "other")
    assert load(path=str(tmp_path / "other")).fingerprint != load(path=str(tmp_path / "model")).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "huge"}, "model.size='huge': must be one of tiny, mini, mid, flash"),
        ({"size": None}, "model.size=None: must be one of"),
        ({"dtype": "float64"}, "model.dtype=float64: must be auto, float32, bfloat16 or float16"),
        ({"device": "tpu9"}, "model.device=tpu9"),
        ({"attention": "sparse"}, "model.attention='sparse': must be one of native, dense"),
        ({"index_quant": "fp5"}, "quant='fp5': must be one of"),
        ({"path": "/nowhere/at/all"}, "model.path=/nowhere/at/all: has no readable config.json"),
    ],
)
def test_what_load_refuses(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load(**options)


def test_size_config():
    assert size_config("flash") is SIZES["flash"]
