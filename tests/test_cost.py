"""The cost model: published figures, scaling laws, hand-computed cases, loops that count one by one."""

import dataclasses

import pytest

from sparsity_lab.cost import (
    PRESETS,
    Architecture,
    Device,
    IndexShape,
    Layer,
    PartCost,
    attached,
    cache_bytes_per_token,
    decode_costs,
    deepseek_v41,
    dense_alternative,
    entry_bytes,
    frame,
    layers_of,
    load_devices,
    part_seconds,
    prefill_costs,
    preset,
    total_seconds,
)
from sparsity_lab.cost.architecture import _STORAGE
from sparsity_lab.lightning import AttachedIndexer, IndexerConfig
from sparsity_lab.models.deepseek_v41 import SIZES
from sparsity_lab.quant import _FORMATS
from sparsity_lab.topology import Topology

FLASH = preset("v41_flash")


def costs_by_part(costs: list[PartCost]) -> dict[tuple[str, str, int], PartCost]:
    return {(c.part, c.layer_kind, c.compress_ratio): c for c in costs}


def small(topology: Topology, *, compressed: bool = True, window: int = 3, topk: int = 4) -> Architecture:
    """Round numbers: 8 FLOP and 5 bytes a key, 100 FLOP and 7 bytes (11 in the window) an attended entry."""
    return Architecture(
        "small", layers_of(topology, compressed=compressed), heads=5, head_dim=6, value_dim=4, entry_bytes=7,
        window_entry_bytes=11, window=window, topk=topk, index=IndexShape(2, 2, 5, 10, 3, 4, 2),
        compressed=compressed, topk_blocks=3, block_size=2,
    )  # fmt: skip


TWO_LEVEL = Topology((0, 2, 2, 2, 2), (1,), (1, 2, 3), 2)  # window, scan, source, consumer, reuse


# --- what is stored


@pytest.mark.parametrize(
    ("name", "total"), [("v41_flash", 890), ("v4_flash", 3514), ("v32", 48068)], ids=["V4.1", "V4", "V3.2"]
)
def test_published_cache_bytes_a_token(name, total):
    assert int(cache_bytes_per_token(preset(name)).total_bytes) == total


def test_entries_of_published_models():
    assert (FLASH.entry_bytes, FLASH.window_entry_bytes, FLASH.index.entry_bytes) == (288, 528, 68)
    assert (preset("v4_flash").entry_bytes, preset("v4_flash").index.entry_bytes) == (584, 68)
    assert (preset("v32").entry_bytes, preset("v32").index.entry_bytes) == (656, 132)


def test_v4_pro_keeps_about_a_tenth_of_v32():
    """Its report's own figure for the KV cache."""
    pro, v32 = (cache_bytes_per_token(preset(name)).total_bytes for name in ("v4_pro", "v32"))
    assert 0.095 < pro / v32 < 0.105


def test_layers_of_published_models():
    for name, expected in {
        "v41_flash": {"window": 2, "scan": 3, "source": 1, "consumer": 4, "reuse": 30},
        "v4_flash": {"window": 2, "scan": 21, "dense": 20},
        "v4_pro": {"scan": 30, "dense": 31},
        "v32": {"scan": 61},
        "smollm2": {"scan": 30},
    }.items():
        kinds = [layer.kind for layer in preset(name).layers]
        assert {kind: kinds.count(kind) for kind in set(kinds)} == expected, name
    assert len(preset("v4_flash").layers) == 43
    assert len(preset("v4_pro").layers) == 61


def test_formats_agree_with_the_quantiser():
    for name, fmt in _FORMATS.items():
        assert _STORAGE[name].block == fmt.block, name
        assert _STORAGE[name].bits == (4 if name.startswith("fp4") else 8), name


def test_entry_bytes_by_hand():
    assert entry_bytes(("bf16", 10)) == 20
    assert entry_bytes(("fp8_e4m3_128", 256)) == 256 + 2 * 4
    assert entry_bytes(("fp4_ue8m0", 64), ("fp32", 1), padding_bytes=2) == 32 + 2 + 4 + 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([("fp3", 32)], "storage format 'fp3': must be one of fp32, bf16"),
        ([("fp4_ue8m0", 48)], "storage format 'fp4_ue8m0': channels=48 must be a multiple of 32"),
        ([("bf16", 0)], "channels=0 must be a multiple of 1"),
    ],
)
def test_entry_bytes_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        entry_bytes(*fields)


def test_attached_indexers_add_keys_and_keep_every_token():
    dense = cache_bytes_per_token(dense_alternative(preset("smollm2")))
    assert (dense.kv_bytes, dense.index_bytes) == (30 * 2 * 3 * 64 * 2, 0), "keys and values of 3 heads x 64 in bf16"
    for ratio in (1, 4):
        model = smollm2(Topology.attached(30, ratio, [0, 10, 20]))
        cache = cache_bytes_per_token(model)
        assert cache.kv_bytes == dense.kv_bytes
        assert cache.index_bytes == 3 * 32 * 2 / ratio, "three sources, 32 channels in bf16"


def smollm2(topology: Topology, config: IndexerConfig | None = None, **selection: int) -> Architecture:
    return attached(
        "smollm2", topology, config or IndexerConfig(), hidden_size=576, heads=9, kv_heads=3, head_dim=64,
        **({"topk": 16} | selection),
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("rank", [None, 48])
def test_index_parameters_are_those_of_the_module(ratio, rank):
    config = IndexerConfig(q_lora_rank=rank)
    module, index = AttachedIndexer(config, 576, ratio), smollm2(Topology.attached(30, ratio), config).index
    weights = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    assert index.query_parameters + index.key_token_parameters + index.key_position_parameters == weights


# --- published cost of the indexer, and how costs grow


def test_v41_indexer_costs_8192_flop_and_68_bytes_a_visible_key():
    for context in (4096, 131072):
        parts = costs_by_part(decode_costs(FLASH, context))
        for kind, ratio in (("scan", 2), ("source", 1)):
            cost = parts["index_scan", kind, ratio]
            keys = cost.layers * (context // ratio)
            assert (cost.flops / keys, cost.bytes / keys) == (8192, 68)


def test_scan_is_linear_and_the_rest_is_constant():
    short, long = (costs_by_part(decode_costs(FLASH, n)) for n in (65536, 1048576))
    assert short.keys() == long.keys()
    for key, cost in short.items():
        grows = key[0] == "index_scan"
        assert long[key].flops == (16 if grows else 1) * cost.flops or key[:2] == ("block_level", "source"), key
        assert long[key].bytes == (16 if grows else 1) * cost.bytes, key
    assert long["block_level", "source", 1].flops == 1048576, "one comparison a score"


def test_consumers_score_the_pool_only():
    pool = 2048 * 8
    for context in (1001, pool, pool + 8, 1 << 20):
        cost = costs_by_part(decode_costs(FLASH, context))["block_level", "consumer", 1]
        blocks = min(2048, -(-context // 8))
        assert cost.flops == 4 * 8192 * min(context, pool)
        assert cost.bytes == 4 * (68 * min(context, pool) + 4 * blocks)
        assert cost.layers == 4


def test_window_layers_cost_only_their_window_and_reuse_layers_no_index():
    costs = decode_costs(FLASH, 1 << 20)
    window = [c for c in costs if c.layer_kind == "window"]
    assert [(c.part, c.layers, c.flops, c.bytes) for c in window] == [
        ("attention", 2, 2 * 128 * 2 * 64 * 1024, 2 * 128 * 528)
    ]
    assert {c.part for c in costs if c.layer_kind == "reuse"} == {"attention"}
    assert sum(c.layers for c in costs if c.layer_kind == "reuse") == 30
    only = dataclasses.replace(FLASH, layers=(Layer("window", 0, False, False),), index=None)
    assert cache_bytes_per_token(only).total_bytes == 0
    assert decode_costs(only, 1 << 20) == decode_costs(only, 128)


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_ratio_divides_what_is_scored_and_stored(ratio):
    one, r = (small(Topology((k,) * 3, (0,), (0,))) for k in (1, ratio))
    scan = [costs_by_part(decode_costs(m, 4096))["index_scan", "scan", k] for m, k in ((one, 1), (r, ratio))]
    assert (scan[0].flops, scan[0].bytes) == (ratio * scan[1].flops, ratio * scan[1].bytes)
    assert cache_bytes_per_token(one).total_bytes == ratio * cache_bytes_per_token(r).total_bytes


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("topology", [TWO_LEVEL, Topology.attached(3, 4), Topology.attached(4, 3, [1])])
@pytest.mark.parametrize("run", [decode_costs, prefill_costs])
def test_everything_selected_costs_what_dense_attention_costs(topology, compressed, run):
    topology = dataclasses.replace(topology, candidate_source_layer=None)
    model = small(topology, compressed=compressed, topk=100)
    for tokens in (1, 2, 50, 100):
        sparse, dense = (
            [c for c in run(m, tokens) if c.part == "attention"] for m in (model, dense_alternative(model))
        )
        for field in ("layers", "flops", "bytes"):
            assert sum(getattr(c, field) for c in sparse) == sum(getattr(c, field) for c in dense), (tokens, field)


def test_sparse_never_attends_to_more_than_dense():
    for name in PRESETS:
        for run in (decode_costs, prefill_costs):
            for tokens in (1, 100, 3000, 40000):
                model = preset(name)
                sparse, dense = (
                    [c for c in run(m, tokens) if c.part == "attention"] for m in (model, dense_alternative(model))
                )
                assert sum(c.flops for c in sparse) <= sum(c.flops for c in dense)
                assert sum(c.bytes for c in sparse) <= sum(c.bytes for c in dense)


def test_dense_alternative_has_no_indexer():
    dense = dense_alternative(FLASH)
    assert {c.part for c in decode_costs(dense, 1000)} == {"attention"}
    assert cache_bytes_per_token(dense).index_bytes == 0
    assert not any(layer.stores_index for layer in dense.layers)
    assert cache_bytes_per_token(dense).kv_bytes == cache_bytes_per_token(FLASH).kv_bytes
    assert [c.layer_kind for c in decode_costs(dense, 1000)] == ["window", "dense", "dense"]


# --- small cases by hand and by loops


def test_a_small_step_by_hand():
    """17 visible tokens: 8 positions at ratio 2, a pool of 6, 4 selected beside a window of 3."""
    parts = costs_by_part(decode_costs(small(TWO_LEVEL), 17))
    attention = {"flops": 100 * (3 + 4), "bytes": 11 * 3 + 7 * 4}
    expected = {
        ("attention", "window", 0): {"flops": 300, "bytes": 33},
        # 10 query weights, 3 a token and 4 a position for the keys: 2 bytes each
        ("index_projection", "scan", 2): {"flops": 2 * (10 + 3 + 4 / 2), "bytes": 2 * (10 + 3 + 4 / 2)},
        ("index_scan", "scan", 2): {"flops": 8 * 8, "bytes": 5 * 8},
        ("attention", "scan", 2): attention,
        ("index_projection", "source", 2): {"flops": 20, "bytes": 20},
        ("index_scan", "source", 2): {"flops": 64, "bytes": 40},
        ("block_level", "source", 2): {"flops": 8, "bytes": 4 * 3},
        ("attention", "source", 2): attention,
        ("index_projection", "consumer", 2): {"flops": 20, "bytes": 20},
        ("block_level", "consumer", 2): {"flops": 8 * 6, "bytes": 5 * 6 + 4 * 3},
        ("attention", "consumer", 2): attention,
        ("attention", "reuse", 2): attention,
    }
    assert {key: {"flops": c.flops, "bytes": c.bytes} for key, c in parts.items()} == expected
    assert {c.layers for c in parts.values()} == {1}


@pytest.mark.parametrize(
    ("visible", "window", "ratio", "attended"),
    [
        (19, 3, 4, 3 + 16),  # the tail's 3 tokens are in the window; 4 positions of 4
        (23, 0, 4, 3 + 16),  # no window: the tail is attended all the same
        (24, 0, 4, 16),
        (40, 5, 4, 5 + 16),
        (12, 5, 4, 12),  # never more than is visible
        (3, 5, 4, 3),
    ],
)
def test_tokens_attended_where_nothing_is_compressed(visible, window, ratio, attended):
    model = small(Topology.attached(1, ratio), compressed=False, window=window, topk=4)
    cost = costs_by_part(decode_costs(model, visible))["attention", "scan", ratio]
    assert (cost.flops, cost.bytes) == (100 * attended, 7 * attended)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("tile", [1, 4, 128])
def test_prefill_flops_are_those_of_all_steps(compressed, tile):
    model = small(TWO_LEVEL, compressed=compressed)
    prefill = costs_by_part(prefill_costs(model, 37, query_tile=tile))
    steps = [costs_by_part(decode_costs(model, n)) for n in range(1, 38)]
    for key, cost in prefill.items():
        assert cost.flops == sum(step[key].flops for step in steps), key
        if key[0] != "index_projection":
            total = sum(step[key].bytes for step in steps)
            assert cost.bytes == total if tile == 1 else cost.bytes < total or key[:2] == ("block_level", "source"), key


def test_prefill_reads_the_indexers_weights_once():
    cost = costs_by_part(prefill_costs(small(TWO_LEVEL), 37))["index_projection", "scan", 2]
    assert cost.bytes == 2 * (10 + 3 + 4)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("tile", [1, 3, 8])
def test_prefill_reads_of_a_tile_are_the_union_of_its_rows(tokens, tile):
    """Windows, scans and dense layers are known position by position, so sets can count what a tile reads."""
    model = small(Topology((0, 2), (1,), (1,)))
    raw = keys = 0
    for start in range(1, tokens + 1, tile):
        rows = range(start, min(start + tile, tokens + 1))
        raw += len({token for n in rows for token in range(max(0, n - 3), n)})
        keys += len({j for n in rows for j in range(n // 2)})
    parts = costs_by_part(prefill_costs(model, tokens, query_tile=tile))
    assert parts["attention", "window", 0].bytes == 11 * raw
    assert parts["index_scan", "scan", 2].bytes == 5 * keys
    dense = costs_by_part(prefill_costs(dense_alternative(model), tokens, query_tile=tile))
    assert dense["attention", "dense", 2].bytes == 11 * raw + 7 * keys


def test_gathering_never_reads_more_than_the_tile_sees():
    model = small(Topology((1,), (0,), (0,)), window=0, topk=4)
    for tile, entries in ((1, 1 + 2 + 3 + 4 * 5), (4, 4 + 8), (8, 8)):
        cost = costs_by_part(prefill_costs(model, 8, query_tile=tile))["attention", "scan", 1]
        assert cost.bytes == 7 * entries, "4 selected a row, but a tile has only so many to read"


def test_a_batch_shares_the_indexers_weights_only():
    one, many = (costs_by_part(decode_costs(FLASH, 5000, batch=batch)) for batch in (1, 64))
    for key, cost in one.items():
        assert many[key].flops == cost.flops
        assert many[key].bytes == cost.bytes / (64 if key[0] == "index_projection" else 1)


def test_flops_of_dense_attention_agree_with_a_measured_kernel():
    """13.9 ms and 633 TFLOP/s of one causal FlashAttention forward on an H200: 32 heads, d 128, 32,768 tokens."""
    layer = attached(
        "layer", Topology((0,), (), ()), IndexerConfig(), hidden_size=4096, heads=32, kv_heads=8, head_dim=128, topk=1
    )
    costs = prefill_costs(layer, 32768)
    assert [c.part for c in costs] == ["attention"]
    assert costs[0].flops / 13.9e-3 == pytest.approx(633e12, rel=2e-3)
    assert total_seconds(costs, load_devices()["h200_measured"]) < 13.9e-3


# --- devices and tables


def test_devices():
    devices = load_devices()
    assert list(devices) == ["h100_sxm", "h200", "h200_measured", "b200", "laptop_cpu"]
    assert devices["h200_measured"] == Device("h200_measured", 790e12, 4.3e12)
    assert devices["h200"].bytes_per_second == 4.8e12
    with pytest.raises(ValueError, match="device='h300': must be one of h100_sxm, h200"):
        devices["h300"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {flops_per_second: 1e12}", "must have exactly bytes_per_second, flops_per_second"),
        ("mine: {flops_per_second: 1, bytes_per_second: 1, watts: 3}", "must have exactly"),
        ("mine: {flops_per_second: fast, bytes_per_second: 1}", "device mine: flops_per_second='fast'"),
        ("mine: {flops_per_second: 1, bytes_per_second: 0}", "device mine: bytes_per_second=0: must be a positive"),
        ("mine: 3", "device 'mine': must have exactly"),
        ("[mine]", "must map names of devices"),
        ("", "must map names of devices"),
    ],
)
def test_damaged_device_files(tmp_path, text, message):
    path = tmp_path / "devices.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_devices(path)


def test_own_devices(tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text("mine: {flops_per_second: 2e12, bytes_per_second: 1e9}")
    assert load_devices(path) == {"mine": Device("mine", 2e12, 1e9)}


def test_time_is_the_longer_of_arithmetic_and_reading():
    device = Device("d", 100.0, 10.0)
    arithmetic = PartCost("attention", "dense", 1, 1, flops=500.0, bytes=20.0)
    reading = PartCost("index_scan", "scan", 1, 1, flops=500.0, bytes=60.0)
    assert part_seconds(arithmetic, device) == 5
    assert part_seconds(reading, device) == 6
    assert total_seconds([arithmetic, reading], device) == 11


def test_frame_is_tidy():
    device = load_devices()["h200"]
    costs = decode_costs(FLASH, 131072)
    table = frame(costs, device)
    assert list(table) == [
        "part", "layer_kind", "compress_ratio", "layers", "flops", "bytes", "seconds", "bound",
    ]  # fmt: skip
    assert not table.duplicated(["part", "layer_kind", "compress_ratio"]).any()
    assert table["seconds"].sum() == pytest.approx(total_seconds(costs, device))
    assert table.loc[table["part"] == "attention", "layers"].sum() == 40
    assert set(table["bound"]) == {"flops", "bytes"}
    scan = table[table["part"] == "index_scan"]
    assert (scan["bound"] == "bytes").all(), "120 FLOP a byte are fewer than the device does"
    assert list(frame(costs)) == list(table)[:-2]
    assert list(frame([])) == list(table)[:-2]


def test_every_preset_on_every_device():
    for name in PRESETS:
        for device in load_devices().values():
            for model in (preset(name), dense_alternative(preset(name))):
                assert total_seconds(decode_costs(model, 4096), device) > 0
                assert total_seconds(prefill_costs(model, 4096), device) > 0
    with pytest.raises(ValueError, match="preset='v5': must be one of v41_flash, v4_flash"):
        preset("v5")


# --- descriptions that cannot be


def test_layers_of_a_topology():
    kinds = ["window", "scan", "source", "consumer", "reuse"]
    assert [layer.kind for layer in layers_of(TWO_LEVEL, compressed=True)] == kinds
    assert [layer.stores_kv for layer in layers_of(TWO_LEVEL, compressed=True)] == [False, True, False, False, False]
    tokens = layers_of(TWO_LEVEL, compressed=False)
    assert [layer.kind for layer in tokens] == ["dense", *kinds[1:]]
    assert all(layer.stores_kv for layer in tokens)
    assert [layer.stores_index for layer in tokens] == [False, True, False, False, False]


def test_placements_of_a_dense_model_differ_in_index_cost_only():
    every = smollm2(Topology.attached(30, 1))
    third = smollm2(Topology.attached(30, 1, range(0, 30, 3)))
    pooled = smollm2(Topology.attached(30, 1, range(0, 30, 3), 0), topk_blocks=8, block_size=8)
    sums = [frame(decode_costs(m, 8192)).groupby("part")[["flops", "bytes"]].sum() for m in (every, third, pooled)]
    assert (sums[0].loc["index_scan"] == 3 * sums[1].loc["index_scan"]).all()
    assert (sums[1].loc["index_scan"] == 10 * sums[2].loc["index_scan"]).all()
    assert all((s.loc["attention"] == sums[0].loc["attention"]).all() for s in sums)


def test_v41_without_quantisation_and_without_pool():
    config = dataclasses.replace(
        SIZES["tiny"], kv_quant="none", index_quant="none", window_quant="none", candidate_source_layer=None
    )
    model = deepseek_v41(config)
    assert (model.entry_bytes, model.window_entry_bytes, model.index.entry_bytes) == (128, 128, 64)
    assert {layer.kind for layer in model.layers} == {"window", "scan", "reuse"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, r"layers=\(\): needs at least one"),
        ({"index": None}, "index=None: its layers run an indexer"),
        ({"topk_blocks": None}, "topk_blocks=None, block_size=2: a topology with a candidate source needs both"),
        ({"topk": 6}, "may hold only 5 visible positions, fewer than topk=6"),
        ({"topk": 0}, "topk=0: must be positive"),
        ({"heads": -1}, "heads=-1: must be positive"),
        ({"window": -1}, "window=-1: must not be negative"),
    ],
)
def test_architecture_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(small(TWO_LEVEL), **changes)


def test_refusals():
    with pytest.raises(ValueError, match="layer kind 'lazy': must be one of"):
        Layer("lazy", 1, True, True)
    with pytest.raises(ValueError, match="compress_ratio=0: a scan layer needs at least 1"):
        Layer("scan", 0, True, True)
    with pytest.raises(ValueError, match="key_token_parameters=-1: must not be negative"):
        IndexShape(1, 1, 1, 1, -1)
    with pytest.raises(ValueError, match="attached indexers share one ratio"):
        smollm2(Topology((1, 2), (0, 1), (0, 1)))
    with pytest.raises(ValueError, match="context_tokens=0: must be at least 1"):
        decode_costs(FLASH, 0)
    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        decode_costs(FLASH, 5, batch=0)
    with pytest.raises(ValueError, match="tokens=0: must be at least 1"):
        prefill_costs(FLASH, 0)
    with pytest.raises(ValueError, match="query_tile=0: must be at least 1"):
        prefill_costs(FLASH, 5, query_tile=0)
