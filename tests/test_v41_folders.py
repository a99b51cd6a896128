"""Checkpoint folders that are damaged, foreign, partly needed or not to be overwritten."""

import dataclasses
import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from test_v41_checkpoint import INDEX, LAYOUTS, assert_same_parameters, parameters, rewrite, stored
from test_v41_engram import SMALL, WORDS, tokenizer_of
from v41_cases import random_tiny, tiny_config

from sparsity_lab.models.deepseek_v41 import checkpoint
from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint, read_config, save_checkpoint
from sparsity_lab.models.deepseek_v41.parallel import Shard


@pytest.fixture(scope="module")
def model():
    return random_tiny()


@pytest.fixture
def folder(model, tmp_path):
    save_checkpoint(model, tmp_path / "model", max_shard_bytes=1 << 20)
    return tmp_path / "model"


def first_shard(folder):
    return min(folder.glob("*.safetensors"))


def test_damaged_and_missing_shards(folder):
    shard = first_shard(folder)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"model\.path=.*{shard.name} is missing or damaged"):
        load_checkpoint(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"model\.path=.*{shard.name} is missing or damaged"):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weights": {}}', '{"weight_map": []}'])
def test_damaged_index(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"model\.path=.*{INDEX} is damaged"):
        load_checkpoint(folder)


def test_index_that_lacks_a_shard(folder):
    index = json.loads((folder / INDEX).read_text())
    gone = first_shard(folder).name
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"missing \(\d+\): model\.embed\.weight, "):
        load_checkpoint(folder)


def test_folders_without_a_model(folder, tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.*no readable config\.json"):
        read_config(tmp_path / "nothing")
    for text, what in (("{", "no readable"), ("[]", "holds no object"), ("{}", "vocab_size, .* missing")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"model\.path=.*{what}"):
            read_config(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=rf"holds neither {INDEX} nor any \*\.safetensors"):
        load_checkpoint(folder, tiny_config())


def test_a_tensor_in_two_files(folder):
    (folder / INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(64)}, folder / "more.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in two files"):
        load_checkpoint(folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_a_text_model_does_not_have_are_passed_over(model, tmp_path, layout):
    save_checkpoint(model, tmp_path / "model", layout=layout)
    foreign = ("vision.patch.weight", "aligner.0.weight", "mtp.0.attn.wq_a.weight", "image_start", "image_newline")
    rewrite(tmp_path / "model", tmp_path / "more", lambda t: t.update({name: torch.ones(3) for name in foreign}))
    assert_same_parameters(load_checkpoint(tmp_path / "more"), load_checkpoint(tmp_path / "model"))


def test_saving_never_overwrites_and_checks_the_layout(model, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=rf"{folder}: exists already"):
        save_checkpoint(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    with pytest.raises(ValueError, match="layout='fp8': must be one of"):
        save_checkpoint(model, folder.parent / "other", layout="fp8")
    split = dataclasses.replace(model.shard, world=2)
    whole, model.shard = model.shard, split
    try:
        with pytest.raises(ValueError, match="spread over processes cannot be saved"):
            save_checkpoint(model, folder.parent / "other")
    finally:
        model.shard = whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_save_leaves_nothing_behind(model, tmp_path, monkeypatch):
    made = 0

    def quantise(weight):
        nonlocal made
        made += 1
        if made == 30:
            raise OSError("disk full")
        return original(weight)

    original = checkpoint.quantise_fp4
    monkeypatch.setattr(checkpoint, "quantise_fp4", quantise)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(model, tmp_path / "deep" / "model", layout="published", max_shard_bytes=1 << 14)
    assert list((tmp_path / "deep").iterdir()) == []


# --- engram -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_only_on_request(tmp_path, caplog, layout):
    model = random_tiny(vocab_size=len(WORDS), engram=SMALL)
    save_checkpoint(model, tmp_path / "model", layout=layout)
    fields = json.loads((tmp_path / "model" / "config.json").read_text()) | {"engram_compressed_vocab_size": 5}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    with caplog.at_level(logging.WARNING):
        without = load_checkpoint(tmp_path / "model")
    assert without.config.engram is None
    assert "engram" in caplog.text
    assert "left out" in caplog.text
    assert not any("engram" in name for name in parameters(without))

    config = read_config(tmp_path / "model", engram=True)
    assert config.engram == dataclasses.replace(SMALL, compressed_vocab_size=5)
    loaded = load_checkpoint(tmp_path / "model", config, tokenizer=tokenizer_of(WORDS))
    tables = {name for name in parameters(loaded) if "engram" in name}
    assert len(tables) == 8
    for name in tables:
        tolerance = 0 if layout == "unquantised" else 0.07
        torch.testing.assert_close(parameters(loaded)[name], parameters(model)[name], rtol=tolerance, atol=tolerance)
    assert loaded.hash.token_map.tolist()[:4] == [0, 1, 1, 1], "ids are normalised by the tokenizer"
    with pytest.raises(ValueError, match="need the checkpoint's own fast tokenizer"):
        load_checkpoint(tmp_path / "model", config)


# --- one process's part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_reads_only_the_experts_it_holds(model, tmp_path, monkeypatch, layout, rank):
    save_checkpoint(model, tmp_path / "model", layout=layout)
    read: list[str] = []
    original = checkpoint._Stored.read
    monkeypatch.setattr(
        checkpoint._Stored, "read", lambda self, name, device: read.append(name) or original(self, name, device)
    )
    whole = parameters(load_checkpoint(tmp_path / "model"))
    read.clear()
    part = load_checkpoint(tmp_path / "model", shard=Shard(rank, 2))
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in read if ".experts." in name}
    assert experts == set(range(4 * rank, 4 * rank + 4)), "of 8"
    assert len(read) == len(set(read))
    everything = {name for name in stored(tmp_path / "model") if not name.endswith(".scale")}
    assert all(".experts." in name for name in everything - set(read))
    halves = {"attn.wq_b.weight": 0, "wo_b.weight": 1, "attn_sink": 0, "experts.w13": 0, "shared_experts.w2.weight": 1}
    for name, p in parameters(part).items():
        axis = next((axis for suffix, axis in halves.items() if name.endswith(suffix) and "indexer" not in name), None)
        if axis is not None:
            assert torch.equal(p, whole[name].chunk(2, axis)[rank]), name


def test_a_process_still_notices_what_is_missing_from_its_part(model, tmp_path):
    save_checkpoint(model, tmp_path / "model")
    lacking = "model.layers.0.ffn.experts.7.w1.weight"
    rewrite(tmp_path / "model", tmp_path / "less", lambda t: t.pop(lacking))
    with pytest.raises(ValueError, match=rf"missing \(1\): {lacking}"):
        load_checkpoint(tmp_path / "less", shard=Shard(1, 2))
    load_checkpoint(tmp_path / "less", shard=Shard(0, 2))
