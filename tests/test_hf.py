"""Hugging Face models: observing them changes nothing, shows everything, and loading is strict."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, EAGER_ONLY, FAMILIES, WINDOW
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from sparsity_lab.cells import grid
from sparsity_lab.checks import CheckError
from sparsity_lab.documents import Document, Documents
from sparsity_lab.measurement import measure
from sparsity_lab.models import hf, loading

LENGTH = 60
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> folder of its tiny checkpoint, made once."""
    return cache(lambda family: tiny_models.make(family, tmp_path_factory.mktemp("models") / family))


def load(folder: Path, attention: str | None = None, **options: Any) -> hf.HFModel:
    return loading.load(str(folder), device="cpu", attn_implementation=attention, **options)


def llama(folder: Any) -> hf.HFModel:
    return load(folder("llama"), "sdpa")


def documents(length: int = LENGTH) -> Documents:
    return Documents((Document(0, tiny_models.tokens(length)[0], "random"),), {"name": "random", "length": length})


def recency(**options: Any) -> Any:
    return grid("recency", topk=4, window=4, **options)


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=tiny_models.tokens(LENGTH)).logits


def traces(model: Any) -> list[Any]:
    """Whatever observing could leave behind."""
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return [configs, hooks, [sorted(vars(m)) for m in model.modules()], dict(ALL_ATTENTION_FUNCTIONS)]


# --- observing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_observing_changes_no_bit(checkpoint: Any, family: str, attention: str, dtype: str) -> None:
    """Logits against a model that was loaded afresh and never observed: during, and after an observation."""
    options = {"attn_implementation": attention, "dtype": DTYPES[dtype]}
    untouched = AutoModelForCausalLM.from_pretrained(checkpoint(family), **options).eval()
    model = load(checkpoint(family), attention, dtype=dtype)
    expected, before = logits_of(untouched), traces(model.model)
    seen: list[int] = []
    with hf._observed(model._attention, lambda acts: seen.append(acts.layer)):
        assert torch.equal(logits_of(model.model), expected)
    assert seen == list(range(model.num_layers))
    outputs: list[Any] = []
    backbone = model.model.base_model
    hook = backbone.register_forward_hook(lambda module, args, out: outputs.append(out.last_hidden_state))
    model.observe(tiny_models.tokens(LENGTH), lambda acts: None, [0])
    hook.remove()
    with torch.inference_mode():
        assert torch.equal(outputs[0], untouched.base_model(tiny_models.tokens(LENGTH)).last_hidden_state)
    assert torch.equal(logits_of(model.model), expected)
    assert traces(model.model) == before


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_observer_sees_every_layer_once(checkpoint: Any, family: str, attention: str) -> None:
    model = load(checkpoint(family), attention)
    config = model.model.config
    inputs: dict[int, torch.Tensor] = {}
    for layer, module in model._attention.items():
        module.register_forward_pre_hook(
            lambda m, args, kwargs, layer=layer: inputs.update(
                {layer: (*args, kwargs.get("hidden_states"))[0].clone()}
            ),
            with_kwargs=True,
        )
    seen = []

    def observer(acts: Any) -> None:
        seen.append(acts.layer)
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert acts.q.shape == (1, model.num_heads, LENGTH, d)
        assert acts.k.shape == acts.v.shape == (1, model.num_kv_heads, LENGTH, d)
        assert acts.output.shape == (1, LENGTH, model.num_heads, d)
        assert acts.x.shape == (1, LENGTH, model.hidden_size)
        assert torch.equal(acts.x, inputs[acts.layer])
        assert (acts.sink is not None) == (family == "gpt_oss")
        assert acts.softcap == (3.0 if family == "gemma2" else None)
        assert acts.window == model.windows()[acts.layer]

    model.observe(tiny_models.tokens(LENGTH), observer, range(model.num_layers))
    assert seen == list(range(model.num_layers))
    assert model.windows() == tiny_models.windows(family)
    assert (model.num_heads, model.hidden_size, model.max_length) == (6, 48, tiny_models.CONTEXT)
    assert model.num_kv_heads == (6 if family in ("gpt_neox", "opt") else 2)


def test_only_the_layers_asked_for_in_order(checkpoint: Any) -> None:
    seen: list[int] = []
    llama(checkpoint).observe(tiny_models.tokens(8), lambda acts: seen.append(acts.layer), [2, 0, 2])
    assert seen == [0, 2]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_error_in_the_observer_leaves_the_model_as_it_was(checkpoint: Any, family: str) -> None:
    model = load(checkpoint(family))
    expected, before = logits_of(model.model), traces(model.model)

    def observer(acts: Any) -> None:
        if acts.layer == 1:
            raise KeyError("from the observer")

    with pytest.raises(KeyError, match="from the observer"):
        model.observe(tiny_models.tokens(LENGTH), observer, [0, 1, 2])
    assert traces(model.model) == before
    assert torch.equal(logits_of(model.model), expected)


def test_an_attention_put_in_by_somebody_else_is_used_and_left(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def attention(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attention)
    llama(checkpoint).observe(tiny_models.tokens(8), lambda acts: None, [1])
    assert len(calls) == 3
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int64), r"\[2, 8\]: must be \[1, t\]"),
        (torch.ones(8, dtype=torch.int64), r"\[8\]: must be \[1, t\]"),
        (torch.ones(1, 0, dtype=torch.int64), r"\[1, 0\]: must be \[1, t\]"),
        (torch.ones(1, 8), "must be int64"),
        (torch.full((1, 8), tiny_models.VOCAB), "tokens 300 to 300: llama has 0 to 299"),
        (torch.full((1, 8), -1), "tokens -1 to -1"),
    ],
)
def test_bad_tokens(checkpoint: Any, tokens: torch.Tensor, message: str) -> None:
    """A batch, and so any padding, is refused: its rows would not be what they seem."""
    with pytest.raises(ValueError, match=message):
        llama(checkpoint).observe(tokens, lambda acts: None, [0])


def test_unknown_layer(checkpoint: Any) -> None:
    with pytest.raises(
        ValueError, match=r"layers=\[3, 9\]: no attention layer of llama that can be observed; it has \[0, 1, 2\]"
    ):
        llama(checkpoint).observe(tiny_models.tokens(8), lambda acts: None, [9, 0, 3])


# --- attentions that are not what they seem --------------------------------------------------------------------------


def distances(t: int) -> torch.Tensor:
    return torch.arange(t).unsqueeze(1) - torch.arange(t)


class AlibiAttention(LlamaAttention):
    """Adds a bias by distance to the mask."""

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kw: Any
    ) -> Any:
        far = distances(hidden_states.shape[1])
        mask = (-0.05 * far.float()).masked_fill(far < 0, float("-inf"))
        return super().forward(hidden_states, position_embeddings, mask[None, None], **kw)


class ChunkedAttention(LlamaAttention):
    """Attends within chunks of 40 tokens."""

    def forward(
        self, hidden_states: Any, position_embeddings: Any = None, attention_mask: Any = None, **kw: Any
    ) -> Any:
        far, chunk = distances(hidden_states.shape[1]), torch.arange(hidden_states.shape[1]) // 40
        hidden = (far < 0) | (chunk.unsqueeze(1) != chunk)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        return super().forward(hidden_states, position_embeddings, mask[None, None], **kw)


class PrivateAttention(LlamaAttention):
    """Goes its own way, past transformers' interface."""

    def forward(self, hidden_states: Any, *args: Any, **kw: Any) -> Any:
        return hidden_states, None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [AlibiAttention, ChunkedAttention])
@pytest.mark.parametrize("row_tile", [None, 4])
def test_unknown_attention_is_stopped(checkpoint: Any, kind: Any, attention: str, row_tile: int | None) -> None:
    """With tiles of 4 rows, too, of which a first one in row order would end before the second chunk begins."""
    model = load(checkpoint("llama"), attention)
    model.model.model.layers[1].self_attn.__class__ = kind
    with pytest.raises(CheckError, match="layer 1: attention rebuilt from its queries and keys differs"):
        measure(model, documents(), recency(), rows=16, row_tile=row_tile)


def test_attention_past_the_interface_is_an_error(checkpoint: Any) -> None:
    model = llama(checkpoint)
    model.model.model.layers[1].self_attn.__class__ = PrivateAttention
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] were to be observed once each and in order, but \[0, 2\] came"):
        measure(model, documents(), recency())


def test_attention_run_twice_is_an_error(checkpoint: Any) -> None:
    inner = llama(checkpoint).model
    inner.model.layers[1] = inner.model.layers[0]
    model = hf.HFModel(inner, name="shared", fingerprint="0")
    with pytest.raises(ValueError, match=r"model=shared: attention layers \[0, 2\].*but \[0, 0, 2\] came by"):
        model.observe(tiny_models.tokens(8), lambda acts: None, model.windows())


def test_two_attentions_of_one_layer_are_an_error(checkpoint: Any) -> None:
    inner = llama(checkpoint).model
    inner.model.layers[1].cross_attention = copy.deepcopy(inner.model.layers[1].self_attn)
    with pytest.raises(ValueError, match="layer 1 has two attentions"):
        hf.HFModel(inner, name="crossed", fingerprint="0")


def test_model_without_known_attention_is_an_error() -> None:
    config = {"vocab_size": 30, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    from transformers import BloomConfig, BloomForCausalLM

    with pytest.raises(ValueError, match="model=bloom: no attention layer"):
        hf.HFModel(BloomForCausalLM(BloomConfig(**config)), name="bloom", fingerprint="0")


def test_window_that_was_not_announced_is_an_error(checkpoint: Any) -> None:
    model = load(checkpoint("mistral"))
    model._attention[1].sliding_window = None
    with pytest.raises(ValueError, match="layer 1 attends with a sliding window of 24, but was said to have None"):
        measure(model, documents(), recency(), layers=[1])


# --- sliding windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "full"), [("gemma2", [1, 3]), ("gpt_oss", [1, 3]), ("gemma3_text", [5])])
def test_sliding_layers_are_skipped_and_said_so(checkpoint: Any, family: str, full: list[int]) -> None:
    model = load(checkpoint(family))
    said: list[str] = []
    results = measure(model, documents(), recency(), say=said.append)
    skipped = [layer for layer in range(model.num_layers) if layer not in full]
    assert sorted(results.tallies["layer"].unique()) == full
    assert said == [f"layers {skipped} do not apply: their sliding window is shorter than {LENGTH} tokens"]
    within = measure(model, documents(WINDOW), recency(), say=said.append)
    assert sorted(within.tallies["layer"].unique()) == list(range(model.num_layers))
    assert len(said) == 1


def test_sliding_layer_as_candidate_source_is_an_error(checkpoint: Any) -> None:
    model = load(checkpoint("gemma2"))
    pool = {"source_layer": 0, "topk_blocks": 4, "block_size": 2}
    with pytest.raises(ValueError, match=r"source_layer=0: not among the measured layers \[1, 3\] \(sliding-window"):
        measure(model, documents(), recency(candidate=pool), envelope=False)
    measure(model, documents(), recency(candidate={**pool, "source_layer": 1}), envelope=False)


def test_only_sliding_layers_is_an_error(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"measure.layers=\[0, 2\]: all are sliding-window layers"):
        measure(load(checkpoint("gemma2")), documents(), recency(), layers=[0, 2])
    mistral = load(checkpoint("mistral"))
    with pytest.raises(ValueError, match="all are sliding-window layers"):
        measure(mistral, documents(WINDOW + 1), recency())
    assert sorted(measure(mistral, documents(WINDOW), recency()).tallies["layer"].unique()) == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_measured(checkpoint: Any, family: str, dtype: str) -> None:
    """With all checks on, which rebuild the layer's output from the probabilities."""
    model = load(checkpoint(family), dtype=dtype)
    assert model.dtype == DTYPES[dtype]
    results = measure(model, documents(WINDOW), recency(), rows=8)
    counted = results.tallies[results.tallies["rows"] > 0]
    assert sorted(counted["layer"].unique()) == list(range(model.num_layers))
    assert counted["oracle_coverage_sum"].min() > 0


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    """A copy of the tiny llama, to be damaged."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_load_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loading.load(str(folder))
    assert model.name == "copy"
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert model.tokenizer("attention")["input_ids"]
    monkeypatch.chdir(folder)
    assert loading.load(".").name == "copy"
    assert loading.load(".", name="mine").name == "mine"
    monkeypatch.setenv("HOME", str(folder.parent))
    assert loading.load("~/copy").fingerprint == model.fingerprint


def test_load_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    source = tiny_models.write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")  # of something else; the GGUF brings its own
    model = loading.load(str(tmp_path / "tiny.gguf"), device="cpu")
    assert (model.name, model.num_layers, model.num_kv_heads) == ("tiny", 3, 2)
    assert torch.equal(logits_of(model.model), logits_of(source))
    assert model.tokenizer.decode(model.tokenizer("def attention(query)")["input_ids"]) == "def attention(query)"
    again = loading.load(str(tmp_path), gguf_file="tiny.gguf", device="cpu")
    assert again.fingerprint == model.fingerprint
    assert measure(model, documents(), recency()).tallies["layer"].max() == 2


def test_bad_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    whole = tmp_path / "tiny.gguf"
    tiny_models.write_gguf(whole)
    (tmp_path / "half.gguf").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (tmp_path / "text.gguf").write_text("not a GGUF file")
    for name in ("half", "text"):
        with pytest.raises(ValueError, match=rf"model.path=.*{name}.gguf: could not be loaded"):
            loading.load(str(tmp_path / f"{name}.gguf"))
    with pytest.raises(ValueError, match=r"model.gguf_file=other.gguf: not in .*; GGUF files there: half.gguf, text"):
        loading.load(str(tmp_path), gguf_file="other.gguf")
    with pytest.raises(ValueError, match=r"leave model.gguf_file=tiny.gguf out"):
        loading.load(str(whole), gguf_file="tiny.gguf")


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "a/b/c", "missing.gguf"])
def test_missing_path(path: str) -> None:
    with pytest.raises(ValueError, match=rf"model.path={path}: no such file or folder"):
        loading.load(path)


def test_file_that_is_no_gguf(folder: Path) -> None:
    with pytest.raises(ValueError, match="is a file, but no GGUF"):
        loading.load(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "dtype=int8: must be auto, float32, bfloat16 or float16"),
        ("device", "tpu", "device=tpu: not a torch device"),
        ("device", "cuda:99", "device=cuda:99: (this machine has no usable CUDA|not usable)"),
        ("device", "meta", "device=meta: not usable"),
        ("trust_remote_code", "false", "model.trust_remote_code='false': must be true or false"),
        ("attn_implementation", "magic", "model.path=.*magic"),
    ],
)
def test_bad_options(folder: Path, option: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loading.load(str(folder), **{option: value})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(folder: Path, dtype: str) -> None:
    assert load(folder, dtype=dtype).dtype == getattr(torch, dtype)
    edit_config(folder, dtype=dtype)
    assert load(folder, dtype="auto").dtype == torch.float32  # on a CPU
    assert loading.resolve_dtype("auto", torch.device("cuda")) == "auto"


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_attention_that_a_family_does_not_have(checkpoint: Any, family: str) -> None:
    """sdpa has neither sinks nor soft-cap."""
    with pytest.raises(ValueError, match=r"sdpa|scaled_dot_product"):
        load(checkpoint(family), "sdpa")
    assert load(checkpoint(family)).model.config._attn_implementation == "eager"


def test_a_softcap_that_would_be_left_out_is_an_error() -> None:
    inner = tiny_models.build("gemma2", attn_implementation="eager")
    inner.config._attn_implementation = "sdpa"  # as some versions of transformers have it by default
    with pytest.raises(ValueError, match=r"model=capped: attn_implementation=sdpa leaves out .* soft-cap of 3\.0"):
        hf.HFModel(inner, name="capped", fingerprint="0")


class Payload:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "payload": Payload(tmp_path / "marker")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model.path=.*could not be loaded as a causal LM from safetensors or GGUF"):
        loading.load(str(folder))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("known", [True, False])
def test_code_in_the_folder_does_not_run(folder: Path, tmp_path: Path, known: bool) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    edit_config(
        folder,
        model_type="llama" if known else "unheard_of",
        auto_map={"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    )
    if known:
        assert type(load(folder).model).__name__ == "LlamaForCausalLM"
    else:
        with pytest.raises(ValueError, match=r"model.path=.*could not be loaded"):
            load(folder)
    assert not marker.exists()


def test_missing_weights_are_an_error(folder: Path) -> None:
    """transformers would start them at random."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for model.layers.1.self_attn.k_proj.weight \(1 in all\)"):
        load(folder)


def test_damaged_folder(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.path=.*could not be loaded"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model.path=.*could not be loaded"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model.path=.*could not be loaded"):
        load(folder)


def test_fingerprint(folder: Path) -> None:
    first = loading.fingerprint(str(folder))
    renamed = folder.rename(folder.parent / "renamed")
    assert loading.fingerprint(str(renamed)) == first
    assert load(renamed).fingerprint == first
    weights = load_file(renamed / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] += 1e-3
    save_file(weights, renamed / "model.safetensors", metadata={"format": "pt"})
    second = loading.fingerprint(str(renamed))
    edit_config(renamed, rope_theta=20000.0)
    assert len({first, second, loading.fingerprint(str(renamed))}) == 3


HUB = """
import json, sys, time
from sparsity_lab.models import hf, loading
out = []
for path, options in json.loads(sys.argv[1]):
    started = time.perf_counter()
    try:
        model = loading.load(path, device="cpu", **options)
        said = [model.name, model.fingerprint]
    except ValueError as error:
        said = [str(error)]
    out.append([*said, time.perf_counter() - started])
print(json.dumps(out))
"""


def test_hub_models(checkpoint: Any, tmp_path: Path) -> None:
    """In a fresh, offline process: a model that the hub cache holds in two commits, and one that nobody has."""
    home = tmp_path / "hub" / "models--tiny--llama"
    for commit, ref in (("a" * 40, "main"), ("b" * 40, "next")):
        shutil.copytree(checkpoint("llama"), home / "snapshots" / commit)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(commit)
    wanted = [["tiny/llama", {}], ["tiny/llama", {"revision": "next"}], ["tiny/llama", {"revision": "b" * 40}]]
    command = [sys.executable, "-c", HUB, json.dumps([*wanted, ["nobody/nothing", {}]])]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment = {k: v for k, v in environment.items() if k not in ("HF_HUB_CACHE", "TRANSFORMERS_CACHE")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    main, other, pinned, unknown = json.loads(run.stdout.splitlines()[-1])
    assert main[0] == "llama"
    assert main[1] != other[1] == pinned[1]
    assert unknown[0].startswith("model.path=nobody/nothing: could not be loaded as a causal LM")
    assert unknown[-1] < 5
