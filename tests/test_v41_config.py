"""The configuration: published files there and back, what is refused, and the named sizes."""

import dataclasses
import json
import re

import pytest
import torch
from v41_cases import NAMES, golden_model, manifest, tiny_config

from sparsity_lab.models.deepseek_v41 import SIZES, DeepseekV41Config
from sparsity_lab.models.deepseek_v41.config import EngramConfig, YarnConfig
from sparsity_lab.models.deepseek_v41.model import DeepseekV41Model

ENGRAM = EngramConfig((1, 3), (240, 306), 8, 2, 3, 50, 7, 384)


def published(**changes) -> dict:
    """The first golden model's config.json."""
    return json.loads(json.dumps(manifest()["two_groups"]["config"])) | changes


def parse(**changes) -> DeepseekV41Config:
    return DeepseekV41Config.from_dict(published(**changes))


def test_a_published_file():
    config = parse()
    assert config.compress_ratios == (0, 0, 2, 2, 1, 1, 1, 1)
    assert (config.kv_source_layers, config.index_source_layers) == ((2, 4), (2, 4, 6))
    assert (config.candidate_source_layer, config.candidate_topk_blocks, config.candidate_block_size) == (4, 3, 2)
    assert config.yarn == YarnConfig(factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1)
    assert config.engram is None
    assert (config.window_quant, config.kv_quant, config.index_quant) == ("fp8_ue8m0", "fp4_e4m3", "fp4_ue8m0")
    assert config.rms_norm_eps == 1e-20


def test_minus_one_means_no_candidate_source():
    assert parse(candidate_source_layer_id=-1).candidate_source_layer is None
    assert parse(candidate_source_layer_id=-1).to_published()["candidate_source_layer_id"] == -1


def test_draft_layers_are_cut_from_the_ratios():
    assert parse(compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 0, 0]) == parse()


def test_more_layers_than_ratios():
    with pytest.raises(ValueError, match=r"num_hidden_layers=9: compress_ratios has 8 entries"):
        parse(num_hidden_layers=9)


def test_text_config_of_a_multimodal_file():
    nested = {"model_type": "deepseek_v41_vl", "vision_config": {}, "text_config": published()}
    assert DeepseekV41Config.from_dict(nested) == parse()


@pytest.mark.parametrize("scaling", [None, {}])
def test_no_yarn(scaling):
    assert parse(rope_scaling=scaling, rope_parameters=None).yarn is None


def test_yarn_is_found_where_newer_files_have_it():
    fields = published()
    del fields["rope_scaling"]
    assert DeepseekV41Config.from_dict(fields).yarn == parse().yarn
    assert parse(rope_scaling=None, rope_parameters={"compress": {"rope_type": "default"}}).yarn is None


def test_yarn_keeps_its_betas_and_older_type_field():
    scaling = {"type": "yarn", "factor": 8, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2}
    assert parse(rope_scaling=scaling).yarn == YarnConfig(8, 128, 16, 2)


def test_engram_fields():
    fields = {f"engram_{name}": value for name, value in dataclasses.asdict(ENGRAM).items()}
    assert parse(**fields).engram == ENGRAM
    del fields["engram_head_dim"], fields["engram_n_heads"]
    with pytest.raises(ValueError, match="engram tables: engram_head_dim, engram_n_heads missing"):
        parse(**fields)


@pytest.mark.parametrize(
    "config",
    [*SIZES.values(), tiny_config(engram=ENGRAM, candidate_source_layer=None, yarn=YarnConfig(4, 64, 20, 2))],
    ids=[*SIZES, "engram"],
)
def test_round_trips(config):
    for fields in (config.to_published(), config.describe()):
        assert DeepseekV41Config.from_dict(json.loads(json.dumps(fields))) == config


@pytest.mark.parametrize("name", NAMES)
def test_golden_configs_round_trip(name):
    config = golden_model(name).config
    again = json.loads(json.dumps(config.to_published()))
    assert DeepseekV41Config.from_dict(again) == config
    original = manifest()[name]["config"]
    same = set(again) & set(original) - {"rope_scaling", "engram_layer_ids"}
    assert len(same) > 30
    assert {n: again[n] for n in same} == {n: original[n] for n in same}


def test_flash_is_the_published_shape():
    with torch.device("meta"):
        model = DeepseekV41Model(SIZES["flash"])
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert routed == 40 * 384 * 3 * 5120 * 2304
    assert 550e9 < total < 552e9
    selection = SIZES["flash"].native_selection
    assert (selection.topk, selection.window, selection.topk_blocks, selection.block_size) == (512, 128, 2048, 8)


@pytest.mark.parametrize(("size", "low", "high"), [("tiny", 1.1e6, 1.3e6), ("mid", 180e6, 220e6)])
def test_sizes_hold_what_their_comments_say(size, low, high):
    with torch.device("meta"):
        assert low < sum(p.numel() for p in DeepseekV41Model(SIZES[size]).parameters()) < high


def test_native_selection_without_a_pool():
    selection = tiny_config(candidate_source_layer=None).native_selection
    assert (selection.topk_blocks, selection.block_size) == (None, None)
    assert selection.compressed
    assert selection.window == 16


REFUSED = {
    "scoring_func": ({"scoring_func": "tanh"}, "scoring_func='tanh': must be one of ('softmax', 'sigmoid'"),
    "missing": ({"head_dim": ...}, "config of a DeepSeek V4.1 model: head_dim missing"),
    "kv heads": ({"num_key_value_heads": 2}, "num_key_value_heads=2: a DeepSeek V4.1 model has 1"),
    "bias": ({"attention_bias": True}, "attention_bias=True: a DeepSeek V4.1 model has False"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu': a DeepSeek V4.1 model has 'silu'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "rope type": ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.rope_type='linear': must be yarn"),
    "zero": ({"hidden_size": 0}, "hidden_size=0: must be a whole number of at least 1"),
    "string": ({"index_topk": "4"}, "index_topk='4': must be a whole number"),
    "boolean": ({"sliding_window": True}, "sliding_window=True: must be a whole number"),
    "shared": ({"n_shared_experts": -1}, "n_shared_experts=-1: must be"),
    "rope odd": ({"qk_rope_head_dim": 15}, "qk_rope_head_dim=15: must be even"),
    "rope wide": ({"qk_rope_head_dim": 34}, "qk_rope_head_dim=34: must be even and at most head_dim=64 and index_head"),
    "groups": ({"o_groups": 3}, "o_groups=3: must divide num_attention_heads=4"),
    "experts": ({"num_experts_per_tok": 7}, "num_experts_per_tok=7: at most n_routed_experts=6"),
    "format": ({"kv_quant": "fp3"}, "quant='fp3': must be one of"),
    "width": ({"head_dim": 40}, "head_dim=40: must be a multiple of 32, the block of window_quant='fp8_ue8m0'"),
    "pool": ({"index_topk": 6}, "candidate_topk_blocks=3 x candidate_block_size=2 may hold only 5 visible"),
    "topology": ({"candidate_source_layer_id": 5}, "candidate_source_layer=5: must be one of index_source_layers"),
    "engram layer": (
        {f"engram_{name}": value for name, value in dataclasses.asdict(ENGRAM).items()} | {"engram_layer_ids": [1, 8]},
        "engram_layer_ids=[1, 8]: must lie within the model's layers 0 to 7",
    ),
    "pool of other keys": (
        {
            "compress_ratios": [1, 1, 1], "num_hidden_layers": 3, "kv_source_layer_ids": [0, 2],
            "index_source_layer_ids": [0, 1, 2], "candidate_source_layer_id": 0,
        },
        "candidate_source_layer=0: its consumer layer 2 uses the keys of layer 2, the pool is made of those of layer 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    changes, message = REFUSED[what]
    fields = {name: value for name, value in published(**changes).items() if value is not ...}
    with pytest.raises(ValueError, match=re.escape(message)):
        DeepseekV41Config.from_dict(fields)


def test_small_pools_and_no_shared_expert_are_allowed_where_wanted():
    assert DeepseekV41Config.from_dict(published(index_topk=6), allow_small_pool=True).index_topk == 6
    assert parse(n_shared_experts=0).n_shared_experts == 0
