"""Families with an indexer of their own: what is observed is what they computed, and dense is dense."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from test_hf import traces
from tiny_models import NATIVE_FAMILIES, TOPK
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from sparsity_lab.activations import LayerActivations
from sparsity_lab.indexer import index_scores
from sparsity_lab.models import hf, hf_native, loading
from sparsity_lab.quant import hadamard_transform
from sparsity_lab.topology import NativeSelection, Topology

LENGTH = 61  # no multiple of the ratio, longer than top-k, window and all of YaRN's original length but three
RATIOS = {"deepseek_v32": (1, 1, 1, 1), "glm_moe_dsa": (1, 1, 1, 1), "deepseek_v4": (0, 4, 0, 4, 4)}
SOURCES = {"deepseek_v32": [0, 1, 2, 3], "glm_moe_dsa": [0, 2], "deepseek_v4": [1, 3, 4]}
LAYERS = {"deepseek_v32": [0, 1, 2, 3], "glm_moe_dsa": [0, 1, 2, 3], "deepseek_v4": [0, 1, 3, 4]}
CASES = [(family, kind) for family in NATIVE_FAMILIES for kind in ("eager", "sdpa")][:-1]  # V4 has no sdpa
ALL = LENGTH + 3  # a budget above any length used here


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, top-k) -> folder of its tiny checkpoint, made once."""
    return cache(
        lambda family, topk=TOPK: tiny_models.make(family, tmp_path_factory.mktemp(family) / family, index_topk=topk)
    )


def load(folder: Path, kind: str | None = None, **options: Any) -> hf.HFModel:
    return loading.load(str(folder), device="cpu", attn_implementation=kind, **options)


def observed(model: hf.HFModel, length: int = LENGTH, layers: Any = None) -> dict[int, LayerActivations]:
    found: dict[int, LayerActivations] = {}
    model.observe(tiny_models.tokens(length), lambda acts: found.update({acts.layer: acts}), layers or model.windows())
    return found


def unobserved(folder: Path, **options: Any) -> Any:
    """The model as transformers alone loads it; skips where an older version cannot run it in this dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    try:
        model(input_ids=tiny_models.tokens(8))
    except RuntimeError as error:
        if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24):
            raise
        pytest.skip(f"transformers {transformers.__version__} itself cannot: {error}")
    return model


def sets(rows: Tensor) -> list[set[int]]:
    return [{int(j) for j in row if j >= 0} for row in rows]


def own_topk(folder: Path, family: str, length: int = LENGTH, **options: Any) -> dict[int, list[set[int]]]:
    """Index source -> the set each row attends to, from a model that nobody observes."""
    model = unobserved(folder, **options)
    found: dict[int, Tensor] = {}
    for layer in SOURCES[family]:
        attention = model.model.layers[layer].self_attn
        indexer = attention.compressor.indexer if family == "deepseek_v4" else attention.indexer
        indexer.register_forward_hook(lambda m, args, out, layer=layer: found.update({layer: out[0].clone()}))
    with torch.inference_mode():
        model(input_ids=tiny_models.tokens(length))
    visible = {layer: visible_of(family, layer, length) for layer in found}
    return {
        layer: [{j for j in row if j < v} for row, v in zip(sets(rows), visible[layer], strict=True)]
        for layer, rows in found.items()
    }


def visible_of(family: str, layer: int, length: int = LENGTH) -> list[int]:
    return [(i + 1) // RATIOS[family][layer] for i in range(length)]


def best(scores: Tensor, count: int, v: int) -> tuple[set[int], set[int]]:
    """Positions that must be and that may be among the `count` best of the first v."""
    count = min(count, v)
    if count == 0:
        return set(), set()
    edge, slack = float(scores[:v].sort(descending=True).values[count - 1]), 1e-6 * float(scores[:v].abs().max())
    listed = scores[:v].tolist()
    return {j for j, x in enumerate(listed) if x > edge + slack}, {j for j, x in enumerate(listed) if x >= edge - slack}


# --- what is observed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_scores_give_the_models_own_topk(checkpoint: Any, family: str, kind: str, dtype: str) -> None:
    folder = checkpoint(family)
    own = own_topk(folder, family, attn_implementation=kind, dtype=getattr(torch, dtype))
    model = load(folder, kind, dtype=dtype)
    found = observed(model)
    assert list(found) == LAYERS[family] == list(model.windows())
    contested = 0
    for layer, acts in found.items():
        if RATIOS[family][layer] == 0:
            assert acts.index is acts.selected is acts.compressed is None
            continue
        index = acts.index
        assert index is not None
        assert acts.selected is not None
        assert (index.layer, index.ratio) == (max(s for s in SOURCES[family] if s <= layer), RATIOS[family][layer])
        n = LENGTH // index.ratio
        assert (index.q.shape, index.k.shape, index.w.shape) == ((1, LENGTH, 4, 16), (1, n, 16), (1, LENGTH, 4))
        assert (index.w.dtype, acts.selected.dtype) == (torch.float32, torch.int32)
        assert sets(acts.selected[0]) == own[index.layer]
        scores = index_scores(index.q, index.k, index.w, index.relu)[0]
        for i, v in enumerate(visible_of(family, layer)):
            must, may = best(scores[i], TOPK, v)
            assert must <= own[index.layer][i] <= may, (layer, i)
            contested += len(may) == TOPK < v
    assert contested > 50  # rows that a wrong score would show in


class TopkInputs(TorchFunctionMode):
    """Collects the tensors [1, LENGTH, n] whose top-k is taken: the index scores, masked already."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "topk" and args[0].shape[:2] == (1, LENGTH):
            self.scores.append(args[0].clone())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_scores_have_the_models_own_values(checkpoint: Any, family: str) -> None:
    """All scales included, which no top-k shows."""
    folder = checkpoint(family)
    with torch.inference_mode(), TopkInputs() as taken:
        AutoModelForCausalLM.from_pretrained(folder)(input_ids=tiny_models.tokens(LENGTH))
    found = observed(load(folder))
    assert len(taken.scores) == len(SOURCES[family])
    for layer, own in zip(SOURCES[family], taken.scores, strict=True):
        index = found[layer].index
        for i, v in enumerate(visible_of(family, layer)):
            scores = index_scores(index.q[:, i : i + 1], index.k, index.w[:, i : i + 1])[0, 0, :v]
            torch.testing.assert_close(scores, own[0, i, :v], atol=1e-6, rtol=1e-5)


def reference(acts: LayerActivations) -> Tensor:
    """Softmax over what each row attends to, by loops: float64 [s, h, dv]."""
    heads, s, _ = acts.q[0].shape
    out = torch.zeros(s, heads, acts.v.shape[-1], dtype=torch.float64)
    chosen = None if acts.selected is None else sets(acts.selected[0])
    for i in range(s):
        tokens = [u for u in range(i + 1) if acts.window is None or i - u < acts.window]
        positions = []
        if acts.compressed is not None:
            visible = range((i + 1) // acts.compressed.ratio)
            positions = [j for j in visible if chosen is None or j in chosen[i]]
        elif chosen is not None:
            tokens = [u for u in tokens if u in chosen[i]]
        for h in range(heads):
            kh = h * acts.k.shape[1] // heads
            keys = [acts.k[0, kh, u] for u in tokens]
            values = [acts.v[0, kh, u] for u in tokens]
            if acts.compressed is not None:
                keys += [acts.compressed.k[0, kh, j] for j in positions]
                values += [acts.compressed.v[0, kh, j] for j in positions]
            logits = [float(acts.q[0, h, i].double() @ key.double()) * acts.scale for key in keys]
            sink = [] if acts.sink is None else [acts.sink[h].item()]
            top = max(logits + sink)
            total = sum(math.exp(x - top) for x in logits + sink)
            for x, value in zip(logits, values, strict=True):
                out[i, h] += math.exp(x - top) / total * value.double()
    return out


@pytest.mark.parametrize("attention", ["native", "dense"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_output_is_the_softmax_over_what_is_selected(checkpoint: Any, family: str, kind: str, attention: str) -> None:
    model = load(checkpoint(family), kind, attention=attention)
    for layer, acts in observed(model).items():
        assert (acts.selected is None) == (attention == "dense" or RATIOS[family][layer] == 0)
        torch.testing.assert_close(acts.output[0].double(), reference(acts), atol=1e-5, rtol=0)
        assert acts.k.shape[:3] == acts.v.shape[:3] == (1, model.num_kv_heads, LENGTH)
        assert acts.x.shape == (1, LENGTH, model.hidden_size)
        if acts.compressed is not None:
            assert acts.compressed.k.shape == acts.compressed.v.shape == (1, 1, LENGTH // 4, 16)
            assert (acts.window, model.windows()[layer]) == (9, None)
        if family == "deepseek_v4":
            for wrong in ({"sink": None}, {"window": 8}, {"window": 10}):
                error = (acts.output[0] - reference(dataclasses.replace(acts, **wrong))).abs().max()
                assert error > 1e-3, (layer, wrong)


@pytest.mark.parametrize("length", [1, 3, 4, 7, LENGTH])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_observing_changes_no_bit(checkpoint: Any, family: str, kind: str, dtype: str, length: int) -> None:
    options = {"attn_implementation": kind, "dtype": getattr(torch, dtype)}
    untouched = unobserved(checkpoint(family), **options)
    model = load(checkpoint(family), kind, dtype=dtype)
    before = traces(model.model)
    ids, seen, hidden = tiny_models.tokens(length), [], []
    with torch.inference_mode():
        expected = untouched(input_ids=ids, use_cache=False).logits
        with hf._observed(model._attention, lambda acts: seen.append(acts.layer), model._tap()):
            assert torch.equal(model.model(input_ids=ids, use_cache=False).logits, expected)
        assert seen == LAYERS[family]
        hook = model.model.base_model.register_forward_hook(lambda m, args, out: hidden.append(out.last_hidden_state))
        model.observe(ids, lambda acts: None, model.windows())
        hook.remove()
        assert torch.equal(hidden[0], untouched.base_model(input_ids=ids).last_hidden_state)
        assert torch.equal(model.model(input_ids=ids, use_cache=False).logits, expected)
    assert traces(model.model) == before


def test_shared_indexer(checkpoint: Any) -> None:
    model = load(checkpoint("glm_moe_dsa"))
    found = observed(model)
    assert [found[layer].index.layer for layer in range(4)] == [0, 0, 2, 2]
    assert found[1].index is found[0].index
    assert found[3].index is found[2].index
    assert torch.equal(found[1].selected, found[0].selected)
    assert not torch.equal(found[2].selected, found[0].selected)
    alone = observed(model, layers=[3])[3]
    assert torch.equal(alone.index.q, found[2].index.q)
    assert torch.equal(alone.output, found[3].output)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_native_selection_of_a_configuration(family: str) -> None:
    ratios, sources = RATIOS[family], SOURCES[family]
    topology = Topology(ratios, tuple(sources), tuple(sources))
    compressed = family == "deepseek_v4"
    config = AutoConfig.for_model(family, **tiny_models.NATIVE_CONFIGS[family])
    expected = NativeSelection(topology, topk=TOPK, window=9 if compressed else 0, compressed=compressed)
    assert hf_native.native_selection_of(config) == expected
    assert hf_native.native_selection_of(AutoConfig.for_model("llama")) is None


# --- attention=dense -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_dense_reaches_later_layers(checkpoint: Any, family: str, kind: str) -> None:
    """The first layer that selects has the same input either way; all later ones see the other output."""
    native, dense = (load(checkpoint(family), kind, attention=a) for a in ("native", "dense"))
    assert (native.attention, dense.attention) == (kind, f"{kind}, dense")
    assert native.fingerprint == dense.fingerprint
    before = traces(dense.model)
    sparse, full = observed(native), observed(dense)
    assert traces(dense.model) == before
    first = SOURCES[family][0]
    for layer in LAYERS[family]:
        same = torch.equal(sparse[layer].x, full[layer].x)
        assert same == (layer <= first)
        assert torch.equal(sparse[layer].output, full[layer].output) == (layer < first)
    last = LAYERS[family][-1]
    assert torch.equal(observed(dense, layers=[last])[last].output, full[last].output)
    ids = tiny_models.tokens(LENGTH)
    with torch.inference_mode():
        assert torch.equal(native.model(input_ids=ids).logits, dense.model(input_ids=ids).logits)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_dense_is_native_where_everything_is_selected(checkpoint: Any, family: str, kind: str) -> None:
    native, dense = (observed(load(checkpoint(family, ALL), kind, attention=a)) for a in ("native", "dense"))
    for layer in LAYERS[family]:
        assert torch.equal(native[layer].output, dense[layer].output)
        if RATIOS[family][layer]:
            assert sets(native[layer].selected[0]) == [set(range(v)) for v in visible_of(family, layer)]


# --- what must not pass ----------------------------------------------------------------------------------------------


def turned(index: tuple[Tensor, Tensor, Tensor], place: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated channels a factor larger, as YaRN's magnitude would make them."""
    q, w, k = (x.clone() for x in index)
    q[..., place] *= 1.28
    k[..., place] *= 1.28
    return q, w, k


FAULTS = {
    "magnitude": lambda q, w, k, place: turned((q, w, k), place),
    "hadamard on q alone": lambda q, w, k, place: (hadamard_transform(q), w, k),
    "keys shifted by one": lambda q, w, k, place: (q, w, k.roll(1, 1)),
    "a head without its weight": lambda q, w, k, place: (q, w * torch.tensor([1.0, 1, 1, 0]), k),
    "not a number": lambda q, w, k, place: (q, w * float("nan"), k),
}


@pytest.mark.parametrize("topk", [TOPK, ALL])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_wrong_scores_are_an_error(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, fault: str, topk: int
) -> None:
    """Also where the model selects everything, and its top-k would show nothing."""
    right = hf_native.FAMILIES[family]
    place = slice(8, 16) if family == "deepseek_v4" else slice(0, 8)
    wrong = dataclasses.replace(right, read=lambda *given: FAULTS[fault](*right.read(*given), place))
    monkeypatch.setitem(hf_native.FAMILIES, family, wrong)
    model = load(checkpoint(family, topk))
    before = traces(model.model)
    with pytest.raises(
        ValueError, match=rf"layer {SOURCES[family][0]}: the scores .* another top-k .*{family} of tran"
    ):
        observed(model)
    assert traces(model.model) == before
    monkeypatch.undo()
    observed(model)


@pytest.mark.parametrize("topk", [TOPK, ALL])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_other_layout_of_pairs_is_an_error(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str, topk: int
) -> None:
    """The two families differ in nothing else that the indexer computes."""
    other = "glm_moe_dsa" if family == "deepseek_v32" else "deepseek_v32"
    monkeypatch.setattr(
        modeling_glm_moe_dsa, "apply_rotary_pos_emb", modeling_deepseek_v32.apply_rotary_pos_emb, raising=False
    )
    wrong = dataclasses.replace(hf_native.FAMILIES[family], read=hf_native.FAMILIES[other].read)
    monkeypatch.setitem(hf_native.FAMILIES, family, wrong)
    with pytest.raises(ValueError, match=f"layer 0: the scores .*{family}"):
        observed(load(checkpoint(family, topk)))


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_another_layout_of_the_modules_is_an_error(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    def read(indexer: Any, calls: Any) -> Any:
        return calls["a module that is not there"]

    monkeypatch.setitem(hf_native.FAMILIES, family, dataclasses.replace(hf_native.FAMILIES[family], read=read))
    with pytest.raises(
        ValueError, match=rf"layer {SOURCES[family][0]}: its indexer could not be read .*KeyError.*5.17"
    ):
        observed(load(checkpoint(family)))


@pytest.mark.parametrize("attention", ["native", "dense"])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_error_in_the_observer_leaves_the_model_as_it_was(checkpoint: Any, family: str, attention: str) -> None:
    model = load(checkpoint(family), attention=attention)
    before, expected = traces(model.model), observed(model)

    def observer(acts: LayerActivations) -> None:
        if acts.layer == 3:
            raise KeyError("from the observer")

    with pytest.raises(KeyError, match="from the observer"):
        model.observe(tiny_models.tokens(LENGTH), observer, model.windows())
    assert traces(model.model) == before
    for layer, acts in observed(model).items():
        assert torch.equal(acts.output, expected[layer].output)


def test_layers_that_attend_to_all_compressed_keys_are_left_out(checkpoint: Any) -> None:
    model = load(checkpoint("deepseek_v4"))
    assert model.windows() == {0: 9, 1: None, 3: None, 4: None}
    with pytest.raises(ValueError, match=r"layers=\[2\]: no attention layer of deepseek_v4 that can be observed"):
        observed(model, layers=[1, 2])


@pytest.mark.parametrize("attention", ["sparse", None, True])
def test_unknown_attention(attention: Any) -> None:
    with pytest.raises(ValueError, match=f"model.attention={attention}: must be native or dense"):
        loading.load("/nowhere", attention=attention)


def test_dense_of_a_dense_model_is_an_error(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path / "llama")
    with pytest.raises(
        ValueError, match=r"model.attention=dense: llama \(llama\) has no selection.*for deepseek_v32, glm"
    ):
        load(folder, attention="dense")
    assert load(folder, "sdpa", attention="native").attention == "sdpa"


def test_unknown_family_with_an_indexer_is_an_error() -> None:
    model = tiny_models.build("llama")
    model.model.layers[1].self_attn.indexer = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="model=new: llama has an indexer of its own that is not known here; known are"
    ):
        hf.HFModel(model, name="new", fingerprint="0")
