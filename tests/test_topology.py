"""Who plays which role: the published roles, attached indexers, and every rule with its message."""

import json
import re

import pytest

from sparsity_lab.index_state import IndexRole
from sparsity_lab.models.deepseek_v41 import SIZES
from sparsity_lab.topology import Topology, check_pool

FLASH = SIZES["flash"].topology


def make(ratios=(0, 2, 2, 1, 1, 1), kv=(1, 3), index=(1, 3, 5), candidate=3) -> Topology:
    return Topology(ratios, kv, index, candidate)


def test_published_roles():
    assert FLASH.num_layers == 40
    assert [FLASH.kv_source(i) for i in (0, 1, 2, 7, 8, 13, 14, 19, 20, 39)] == [
        None, None, 2, 2, 8, 8, 14, 14, 20, 20,
    ]  # fmt: skip
    assert [FLASH.index_source(i) for i in (0, 2, 7, 20, 23, 24, 27, 35, 36, 39)] == [
        None, 2, 2, 20, 20, 24, 24, 32, 36, 36,
    ]  # fmt: skip
    roles = {i: FLASH.candidate_role(i) for i in range(40)}
    assert [i for i, role in roles.items() if role == "source"] == [20]
    assert [i for i, role in roles.items() if role == "consumer"] == [24, 28, 32, 36]
    reuse = [i for i in range(40) if FLASH.index_source(i) not in (None, i)]
    assert len(reuse) == 30, "the other layers reuse the latest top-k"
    pool = {"topk": 512, "topk_blocks": 2048, "block_size": 8}
    assert FLASH.index_role(28, **pool) == IndexRole(28, 20, 1, 512, "consumer", 2048, 8)
    assert FLASH.index_role(8, **pool) == IndexRole(8, 8, 2, 512, "none", 2048, 8)
    assert FLASH.index_role(20, **pool) == IndexRole(20, 20, 1, 512, "source", 2048, 8)


def test_every_index_source_of_a_role_has_the_keys_it_reads():
    for layer in FLASH.index_source_layers:
        role = FLASH.index_role(layer, topk=4, topk_blocks=2, block_size=4)
        assert role.owner in FLASH.kv_source_layers
        assert FLASH.compress_ratios[role.owner] == role.ratio


def test_attached_runs_an_indexer_in_every_layer():
    topology = Topology.attached(5, 4)
    assert topology.compress_ratios == (4,) * 5
    assert [topology.index_source(i) for i in range(5)] == list(range(5))
    assert [topology.kv_source(i) for i in range(5)] == list(range(5)), "each makes its own keys"
    assert {topology.candidate_role(i) for i in range(5)} == {"none"}


def test_attached_layers_before_the_first_source_stay_dense():
    topology = Topology.attached(6, 2, [2, 4], candidate_source_layer=2)
    assert topology.compress_ratios == (0, 0, 2, 2, 2, 2)
    assert [topology.index_source(i) for i in range(6)] == [None, None, 2, 2, 4, 4]
    assert [topology.candidate_role(i) for i in range(6)] == ["none", "none", "source", "none", "consumer", "none"]


@pytest.mark.parametrize("topology", [FLASH, make(), make(candidate=None), Topology((0, 0), (), ())])
def test_describe_and_back(topology):
    fields = json.loads(json.dumps(topology.describe()))
    assert Topology.from_dict(fields) == topology


def test_the_candidate_source_may_be_left_out():
    fields = make(candidate=None).describe()
    del fields["candidate_source_layer"]
    assert Topology.from_dict(fields) == make(candidate=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": [1]}, "unknown fields ['sources'], missing fields []"),
        ({"kv_source_layers": None}, "unknown fields [], missing fields ['kv_source_layers']"),
    ],
)
def test_fields_that_do_not_exist_or_lack(change, message):
    fields = {name: value for name, value in {**make().describe(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology.from_dict(fields)


RULES = {
    "no layers": ({"ratios": (), "kv": (), "index": (), "candidate": None}, "compress_ratios=[]: needs one entry"),
    "negative ratio": ({"ratios": (0, 2, 2, 1, 1, -1)}, "compress_ratios=[0, 2, 2, 1, 1, -1]: must not be negative"),
    "ratio no number": ({"ratios": (0, 2.0, 2, 1, 1, 1)}, "compress_ratios=[0, 2.0, 2, 1, 1, 1]: must be whole"),
    "ratio a boolean": ({"ratios": (False, 2, 2, 1, 1, 1)}, "compress_ratios=[False, 2, 2, 1, 1, 1]: must be whole"),
    "kv no number": ({"kv": (1, "3")}, "kv_source_layers=[1, '3']: must be whole numbers"),
    "kv not ascending": ({"kv": (3, 1)}, "kv_source_layers=[3, 1]: must be ascending, each layer once"),
    "index twice": ({"index": (1, 3, 3, 5)}, "index_source_layers=[1, 3, 3, 5]: must be ascending, each layer once"),
    "kv outside": ({"kv": (1, 3, 6)}, "kv_source_layers: [6] lie outside the model's layers 0 to 5"),
    "index negative": ({"index": (-1, 1, 3)}, "index_source_layers: [-1] lie outside the model's layers 0 to 5"),
    "kv window-only": ({"kv": (0, 1, 3)}, "kv_source_layers: layers [0] have compress_ratio 0"),
    "index window-only": ({"index": (0, 1, 3)}, "index_source_layers: layers [0] have compress_ratio 0"),
    "kv without indexer": ({"index": (1, 5), "candidate": None}, "kv_source_layers: layer 3 is not in index_source"),
    "before any source": (
        {"kv": (3,), "index": (3, 5)},
        "kv_source_layers=[3]: layer 1 (compress_ratio 2) comes before any source",
    ),
    "other ratio than its source": (
        {"ratios": (0, 2, 2, 2, 1, 1)},
        "kv_source_layers: layer 4 has compress_ratio 1, its source layer 3 has 2; they must be equal",
    ),
    "index source of another ratio": (
        {"ratios": (2, 1, 2), "kv": (0,), "index": (0, 1), "candidate": None},
        "kv_source_layers: layer 1 has compress_ratio 1, its source layer 0 has 2; they must be equal",
    ),
    "candidate no index source": ({"candidate": 4}, "candidate_source_layer=4: must be one of index_source_layers="),
    "candidate outside": ({"candidate": 9}, "candidate_source_layer=9: must be one of index_source_layers=[1, 3, 5]"),
    "candidate a boolean": ({"candidate": True}, "candidate_source_layer=[True]: must be whole numbers"),
    "candidate without consumers": ({"candidate": 5}, "candidate_source_layer=5: no index source after it"),
    "consumer of another ratio": (
        {"candidate": 1},
        "candidate_source_layer=1 has compress_ratio 2, its consumer layer 3 has 1; they must be equal",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_name_the_field_and_the_layer(rule):
    change, message = RULES[rule]
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**change)


def test_attached_rules():
    with pytest.raises(ValueError, match=r"index_source_layers: \[7\] lie outside the model's layers 0 to 3"):
        Topology.attached(4, 2, [0, 7])
    with pytest.raises(ValueError, match=r"index_source_layers=\['a'\]: must be whole numbers"):
        Topology.attached(4, 2, ["a"])
    with pytest.raises(ValueError, match=r"candidate_source_layer=1: must be one of index_source_layers=\[0, 2\]"):
        Topology.attached(4, 2, [0, 2], candidate_source_layer=1)


@pytest.mark.parametrize("layer", [-1, 6])
def test_layers_outside_the_model(layer):
    for ask in (make().kv_source, make().index_source):
        with pytest.raises(ValueError, match=f"layer {layer}: the model has layers 0 to 5"):
            ask(layer)


def test_only_index_sources_have_an_index_role():
    for layer in (0, 2, 4):
        with pytest.raises(ValueError, match=rf"layer {layer} is not in index_source_layers=\[1, 3, 5\]"):
            make().index_role(layer, topk=4, topk_blocks=2, block_size=4)


@pytest.mark.parametrize(("topk", "topk_blocks", "block_size"), [(16, 5, 4), (9, 9, 1), (17, 5, 4), (1, 1, 8)])
def test_pools_that_always_fill_the_selection(topk, topk_blocks, block_size):
    """The pinned block may hold one visible position, all other kept blocks are full."""
    check_pool(topk, topk_blocks, block_size)


@pytest.mark.parametrize(("topk", "topk_blocks", "block_size"), [(18, 5, 4), (10, 9, 1), (2, 1, 8)])
def test_pools_that_may_be_too_small(topk, topk_blocks, block_size):
    least = topk_blocks * block_size - block_size + 1
    message = f"candidate_topk_blocks={topk_blocks} x candidate_block_size={block_size} may hold only {least}"
    with pytest.raises(ValueError, match=rf"{message}.*topk={topk}"):
        check_pool(topk, topk_blocks, block_size)
