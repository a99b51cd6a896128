"""Checkpoint folders: both layouts there and back, shards, partial reads, what is refused and what is passed over."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from v41_cases import prompt, random_tiny, tiny_config

from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint, save_checkpoint

LAYOUTS = ("unquantised", "published")
INDEX = "model.safetensors.index.json"
EXPERT = "layers.0.ffn.experts.3.w1"


@pytest.fixture(scope="module")
def model():
    return random_tiny()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """One folder a layout, in several shards; tests must not change them."""
    folders = {layout: tmp_path_factory.mktemp("saved") / layout for layout in LAYOUTS}
    for layout, folder in folders.items():
        save_checkpoint(model, folder, layout=layout, max_shard_bytes=1 << 20)
    return folders


def stored(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def rewrite(source, target, change) -> None:
    """A copy of a folder in one file without an index, after `change` of its tensors."""
    tensors = stored(source)
    change(tensors)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")


def parameters(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def assert_same_parameters(one, other) -> None:
    one, other = parameters(one), parameters(other)
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_unquantised_round_trip_keeps_every_bit(model, saved):
    loaded = load_checkpoint(saved["unquantised"])
    assert loaded.config == model.config
    assert_same_parameters(loaded, model)
    ids = prompt(20)
    with torch.inference_mode():
        assert torch.equal(loaded(ids), model(ids))


def test_names_of_the_layouts(saved):
    plain, published = stored(saved["unquantised"]), stored(saved["published"])
    assert {"lm_head.weight", f"model.{EXPERT}.weight", "model.embed.weight", "model.norm.weight"} <= set(plain)
    assert all(name.startswith("model.") or name == "lm_head.weight" for name in plain)
    assert {"head.weight", "embed.weight", "norm.weight", f"{EXPERT}.weight", f"{EXPERT}.scale"} <= set(published)
    assert {name for name in published if not name.endswith(".scale")} == {
        name.removeprefix("model.").replace("lm_head", "head") for name in plain
    }


def test_published_types(saved):
    tensors = stored(saved["published"])
    types = {name: t.dtype for name, t in tensors.items()}
    assert types[f"{EXPERT}.weight"] == torch.int8
    assert tensors[f"{EXPERT}.weight"].shape == (64, 32)
    for name in ("layers.2.attn.wq_a", "layers.2.attn.indexer.wq_b", "layers.2.ffn.shared_experts.w2"):
        assert types[f"{name}.weight"] == torch.float8_e4m3fn
        assert types[f"{name}.scale"] == torch.float8_e8m0fnu
    for name in ("embed.weight", "layers.2.attn.compressor.wkv.weight", "layers.2.ffn.gate.weight", "norm.weight"):
        assert types[name] == torch.bfloat16
    for name in ("layers.2.attn.attn_sink", "layers.2.hc_ffn_fn", "layers.2.ffn.gate.bias"):
        assert types[name] == torch.float32


def test_published_round_trip_keeps_the_values(model, saved, tmp_path):
    once = load_checkpoint(saved["published"])
    for name, p in parameters(once).items():
        error = (p - parameters(model)[name]).abs().max() / parameters(model)[name].abs().max().clamp(min=1e-9)
        assert error < (0.2 if ".experts." in name else 0.065), name
    save_checkpoint(once, tmp_path / "again", layout="published")
    assert_same_parameters(load_checkpoint(tmp_path / "again"), once)
    again = stored(tmp_path / "again")
    for name, t in stored(saved["published"]).items():
        if t.dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(again[name], t), name
    save_checkpoint(once, tmp_path / "plain")
    assert_same_parameters(load_checkpoint(tmp_path / "plain"), once)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_index(saved, tmp_path, layout):
    folder = saved[layout]
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert set(index["weight_map"]) == set(stored(folder))
    for file in files:
        tensors = load_file(file)
        assert set(tensors) == {name for name, at in index["weight_map"].items() if at == file.name}
        assert sum(t.nbytes for t in tensors.values()) <= 1 << 20
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(folder).values())
    rewrite(folder, tmp_path / "single", lambda tensors: None)
    assert_same_parameters(load_checkpoint(tmp_path / "single"), load_checkpoint(folder))


def test_files_the_index_does_not_name_are_not_read(saved, tmp_path):
    folder = tmp_path / "extra"
    rewrite(saved["unquantised"], folder, lambda tensors: None)
    names = list(load_file(folder / "model.safetensors"))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    (folder / "consolidated.safetensors").write_bytes(b"not safetensors")
    load_checkpoint(folder)


def test_bfloat16_keeps_what_must_be_float32(model, saved):
    loaded = load_checkpoint(saved["unquantised"], dtype=torch.bfloat16)
    kept = {name for name, p in loaded.named_parameters() if p.dtype == torch.float32}
    assert {name.split(".")[-1] for name in kept} == {
        "attn_sink", "bias", "bias_vl", "hc_attn_fn", "hc_attn_base", "hc_attn_scale",
        "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale",
    }  # fmt: skip
    for name, p in loaded.named_parameters():
        want = parameters(model)[name]
        assert torch.equal(p, want if name in kept else want.bfloat16()), name
    with torch.inference_mode():
        logits, exact = loaded(prompt(20)), model(prompt(20))
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits.flatten(), exact.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_error_lists_everything_that_does_not_fit(saved, tmp_path, layout):
    prefix = "model." if layout == "unquantised" else ""

    def spoil(tensors):
        del tensors[f"{prefix}norm.weight"]
        del tensors[f"{prefix}layers.1.attn.attn_sink"]
        tensors[f"{prefix}layers.9.attn.attn_sink"] = torch.ones(4)
        tensors[f"{prefix}layers.0.attn.q_norm.weight"] = torch.ones(31)
        tensors[f"{prefix}{EXPERT}.weight"] = tensors[f"{prefix}{EXPERT}.weight"][:40].clone()

    rewrite(saved[layout], tmp_path / "bad", spoil)
    with pytest.raises(ValueError, match=r"does not fit its config\.json") as caught:
        load_checkpoint(tmp_path / "bad")
    text = str(caught.value)
    assert f"missing (2): {prefix}layers.1.attn.attn_sink, {prefix}norm.weight;" in text
    assert f"unknown (1): {prefix}layers.9.attn.attn_sink;" in text
    assert "misshapen (2): " in text
    assert f"{prefix}layers.0.attn.q_norm.weight is [31], must be [32]" in text
    assert f"{prefix}{EXPERT}.weight is [40, 64], must be [64, 64]" in text
    assert str(tmp_path / "bad") in text


def test_a_long_list_is_cut(saved, tmp_path):
    with pytest.raises(ValueError, match=r"missing \(\d\d+\): .* \.\.\."):
        load_checkpoint(saved["unquantised"], tiny_config(n_routed_experts=16))


def test_a_low_precision_weight_needs_a_scale_of_its_shape(saved, tmp_path):
    fp8 = "layers.1.attn.wq_a"

    def drop(tensors):
        del tensors[f"{fp8}.scale"], tensors[f"{EXPERT}.scale"]

    rewrite(saved["published"], tmp_path / "none", drop)
    with pytest.raises(ValueError, match=rf"missing \(2\): {EXPERT}.scale, {fp8}.scale"):
        load_checkpoint(tmp_path / "none")
    rewrite(saved["published"], tmp_path / "short", lambda t: t.update({f"{fp8}.scale": t[f"{fp8}.scale"][:, :1]}))
    with pytest.raises(ValueError, match=rf"{fp8}.*scale \[1, 1\]: does not cover"):
        load_checkpoint(tmp_path / "short")
