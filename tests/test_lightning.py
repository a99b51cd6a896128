"""The lightning scorer: its scores against the formula, untrained and loaded weights, weight files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from fake_model import FakeModel, documents, tiles_of
from safetensors import safe_open
from safetensors.torch import save_file

from sparsity_lab.cells import grid
from sparsity_lab.lightning import METADATA_KEY, SHIPPED, IndexerConfig, Lightning, save_weights
from sparsity_lab.measurement import measure
from sparsity_lab.rope import precompute_freqs_cis, rotate_channels
from sparsity_lab.shape import caveats, described_scorers

LENGTH = 47
SMALL = IndexerConfig(index_n_heads=3, index_head_dim=8, rope_head_dim=4, head_dim=6)
CONFIGS = {
    "v4.1": SMALL,
    "low rank": dataclasses.replace(SMALL, q_lora_rank=5),
    "no relu": dataclasses.replace(SMALL, relu=False),
    "v3.2": dataclasses.replace(
        SMALL, rope_layout="half", rope_place="first", hadamard=True, key_norm="layer", quant="none"
    ),
    "fp4": dataclasses.replace(SMALL, index_head_dim=32, rope_head_dim=16, quant="fp4_ue8m0"),
}


def tile_of(model: FakeModel, rows: list[int]):
    return tiles_of(model, documents(1, LENGTH)[0], torch.tensor(rows), len(rows))[1]


@pytest.mark.parametrize("name", ["v4.1", "low rank", "no relu"])
@pytest.mark.parametrize("ratio", [1, 4])
def test_scores_are_the_formula(name, ratio):
    config, model = CONFIGS[name], FakeModel(num_layers=2)
    scorer, rows = Lightning(model, config), [3, 20, 46]
    tile = tile_of(model, rows)
    found = scorer.scores(tile, ratio, "layer")[0]
    module, x = scorer.module(1, ratio), tile.acts.x[0].float()
    table = precompute_freqs_cis(4, LENGTH, 0, config.rope_theta, 1.0, 32, 1)

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        at = table[position : position + 1]
        return rotate_channels(vector.view(1, 1, -1), at, 4, place="last", layout="adjacent").view(-1)

    for i, row in enumerate(rows):
        qr = x[row] if module.wq_a is None else module.q_norm(module.wq_a(x[row]))
        weights = module.indexer.weights_proj(x[row]) * 8**-0.5 * 3**-0.5
        heads = module.indexer.wq_b(qr).view(3, 8)
        for j in range(LENGTH // ratio):
            group = x[j * ratio : (j + 1) * ratio]
            values = module.compressor.wkv(group)
            if ratio > 1:
                values = values * module.compressor.wgate(group).softmax(0)
            key = turned(module.indexer.k_norm(module.indexer.wk(module.compressor.norm(values.sum(0)))), j * ratio)
            dots = torch.stack([turned(head, row) @ key for head in heads])
            wanted = (weights * (dots.relu() if config.relu else dots)).sum()
            assert float(found[i, j]) == pytest.approx(float(wanted), abs=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_do_not_depend_on_each_other(name):
    model = FakeModel(num_layers=2)
    scorer = Lightning(model, CONFIGS[name])
    whole = scorer.scores(tile_of(model, list(range(LENGTH))), 2, "layer")
    some = scorer.scores(tile_of(model, [5, 17, 40]), 2, "layer")
    torch.testing.assert_close(some, whole[:, [5, 17, 40]], rtol=1e-5, atol=1e-6)


def test_untrained_weights_come_from_the_seed_layer_and_ratio_alone():
    model = FakeModel(num_layers=2)
    before = torch.random.get_rng_state()
    first, again = Lightning(model, SMALL, seed=3), Lightning(model, SMALL, seed=3)
    again.module(0, 4)  # asked for in another order
    weights = [m.indexer.wq_b.weight for m in (first.module(1, 1), again.module(1, 1), first.module(0, 1))]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], Lightning(model, SMALL, seed=4).module(1, 1).indexer.wq_b.weight)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.fixture
def saved(tmp_path):
    model = FakeModel(num_layers=2)
    scorer = Lightning(model, SMALL, seed=1)
    for ratio in (1, 4):
        modules = {layer: scorer.module(layer, ratio) for layer in (0, 1)}
        save_weights(tmp_path / "w" / f"r{ratio}.safetensors", modules, SMALL, model, note="test")
    return model, scorer, tmp_path / "w"


def test_saved_weights_give_the_same_numbers(saved):
    model, scorer, folder = saved
    cells = grid("lightning", topk=[2, 5], compress_ratio=[1, 4])
    docs = documents(2, LENGTH)
    live = measure(model, docs, cells, scorers={"lightning": scorer}, envelope=False, rows=None)
    loaded = measure(
        model, docs, cells, scorers={"lightning": Lightning(model, weights=folder)}, envelope=False, rows=None
    )
    values = [name for name in live.tallies if name != "cell_id"]
    columns = ["recall", "coverage", "topk", "compress_ratio", "layer"]
    assert live.frame()[columns].equals(loaded.frame()[columns])
    assert len(live.tallies[values]) == len(loaded.tallies[values])
    assert set(live.cells).isdisjoint(loaded.cells)  # untrained from a seed and loaded from a file are told apart


def test_weights_are_checked_before_they_are_used(saved, tmp_path):
    model, _, folder = saved
    one = folder / "r4.safetensors"
    other = FakeModel(num_layers=2, seed=9)
    other.fingerprint = "0" * 16
    with pytest.raises(ValueError, match=r"scorer\.weights=.*made for fake.*not for"):
        Lightning(other, weights=one)
    with pytest.raises(ValueError, match=r"made for compress_ratio \[4\], not for selection\.compress_ratio=2"):
        Lightning(model, weights=one).module(0, 2)
    with pytest.raises(ValueError, match=r"has no indexer for layer 7 \(layers \[0, 1\]\)"):
        Lightning(model, weights=one).module(7, 4)
    with pytest.raises(ValueError, match=r"no such file"):
        Lightning(model, weights=tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("not one")
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    for name in ("text", "foreign"):
        with pytest.raises(ValueError, match=rf"{name}\.safetensors: not an indexer weight file"):
            Lightning(model, weights=tmp_path / f"{name}.safetensors")


def test_a_file_holds_one_ratio(saved, tmp_path):
    model, scorer, _ = saved
    modules = {0: scorer.module(0, 1), 1: scorer.module(1, 4)}
    with pytest.raises(ValueError, match=r"compress_ratio=\[1, 4\]: a weight file holds the indexers of one ratio"):
        save_weights(tmp_path / "x.safetensors", modules, SMALL, model)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_folder_with_two_files_of_one_ratio_is_refused(saved, tmp_path):
    model, scorer, _ = saved
    for name in ("a", "b"):
        save_weights(tmp_path / f"{name}.safetensors", {0: scorer.module(0, 1)}, SMALL, model)
    with pytest.raises(ValueError, match=r"two files for compress_ratio=1, the second is b\.safetensors"):
        Lightning(model, weights=tmp_path)


def test_weights_may_be_stored_in_half_the_bits_and_are_used_in_float32(saved, tmp_path):
    model, scorer, _ = saved
    path, module = tmp_path / "half.safetensors", scorer.module(0, 1)
    save_weights(path, {0: module}, SMALL, model, dtype=torch.bfloat16, note="kept")
    loaded = Lightning(model, weights=path)
    assert loaded.files[1].about["note"] == "kept"
    for one, other in zip(module.parameters(), loaded.module(0, 1).parameters(), strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(other, one.bfloat16().float())


def test_weights_used_beyond_their_length_are_told_once(saved, tmp_path, caplog):
    model, scorer, _ = saved
    save_weights(tmp_path / "short.safetensors", {0: scorer.module(0, 2)}, SMALL, model, data={"length": LENGTH})
    loaded = Lightning(model, weights=tmp_path / "short.safetensors")
    assert loaded.distilled_lengths == {2: LENGTH}

    def score(scorer: Lightning, length: int) -> None:
        x = torch.randn(1, length, model.hidden_size)
        scorer.group_keys(0, x, x[:, None], 2, 0)

    score(loaded, LENGTH)
    score(scorer, 4 * LENGTH)  # untrained
    untold = Lightning(model, weights=tmp_path / "w" / "r1.safetensors")  # a file that does not tell its length
    untold.group_keys(0, torch.randn(1, 99, model.hidden_size), torch.zeros(1, 1, 99, 1), 1, 0)
    assert caplog.messages == []
    score(loaded, LENGTH + 1)
    score(loaded, 2 * LENGTH)
    (told,) = caplog.messages
    assert "short.safetensors: distilled on documents of 47 tokens, used on 48" in told


def test_shipped_weights_tell_their_length():
    files = sorted((SHIPPED / "smollm2").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        with safe_open(file, framework="pt") as handle:
            assert json.loads(handle.metadata()[METADATA_KEY])["data"]["length"] == 2048


def test_a_manifest_tells_weights_used_beyond_their_length(saved, tmp_path):
    model, scorer, _ = saved
    for ratio, length in ((1, 32), (2, 64)):
        path = tmp_path / "both" / f"{ratio}.safetensors"
        save_weights(path, {0: scorer.module(0, ratio)}, SMALL, model, data={"length": length})
    told = described_scorers({"learned": Lightning(model, weights=tmp_path / "both"), "untrained": scorer})
    assert told["learned"]["distilled"] == {"weights": str(tmp_path / "both"), "lengths": {"1": 32, "2": 64}}
    assert told["untrained"]["distilled"] == {}
    cells = [
        {"scorer": name, "compress_ratio": ratio, "length": length}
        for name in ("learned", "untrained", "quest")
        for ratio in (1, 2)
        for length in (32, 50)
    ]
    (one,) = caveats({"scorers": told}, cells)
    assert "both: distilled on documents of 32 tokens, used on 50" in one
    assert len(caveats({"scorers": told}, cells, length=100)) == 2
    assert caveats({}, cells) == []
