"""Published models and attached indexers as architectures.

Sources: the models' config.json (sizes and layer patterns) and technical reports; entry layouts as vLLM documents them
(docs.vllm.ai, `flashmla_sparse`: 656 bytes for V3.2; `kv_cache_interface`: 584 bytes for V4) and, for V4.1, those of
`DeepseekV41Config`. Presets leave out the draft (multi-token prediction) layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparsity_lab.cost.architecture import Architecture, IndexShape, Layer, entry_bytes, layers_of
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.models.deepseek_v41 import SIZES, DeepseekV41Config
from sparsity_lab.topology import Topology

FP8 = 1  # bytes of a stored weight; block scales (below 0.1 %) left out


def deepseek_v41(config: DeepseekV41Config, name: str = "deepseek_v41") -> Architecture:
    """A DeepSeek V4.1 model: main entries, windows and index keys stored in the configuration's formats.

    Keys and values are one latent; index keys are made of it, so the compressor is not the indexer's cost.
    """
    c = config
    index = IndexShape(
        c.index_n_heads,
        c.index_head_dim,
        entry_bytes((_stored(c.index_quant), c.index_head_dim)),
        query_parameters=c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.hidden_size * c.index_n_heads,
        key_position_parameters=c.head_dim * c.index_head_dim,
        weight_bytes=FP8,
    )
    native = c.native_selection
    return Architecture(
        name,
        layers_of(native.topology, compressed=True),
        heads=c.num_attention_heads,
        head_dim=c.head_dim,
        value_dim=c.head_dim,
        entry_bytes=entry_bytes((_stored(c.kv_quant), c.head_dim)),
        window_entry_bytes=entry_bytes((_stored(c.window_quant), c.head_dim)),
        window=native.window,
        topk=native.topk,
        index=index,
        compressed=True,
        topk_blocks=native.topk_blocks,
        block_size=native.block_size,
    )


def attached(
    name: str,
    topology: Topology,
    indexer: IndexerConfig,
    *,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    topk: int,
    window: int = 0,
    topk_blocks: int | None = None,
    block_size: int | None = None,
    kv_format: str = "bf16",
) -> Architecture:
    """Lightning indexers attached to a dense model with `kv_heads` key heads.

    Every layer keeps all its tokens' keys and values, so that selecting saves reading and no memory; index keys come on
    top, one a compressed position, with a compressor of their own. Index keys and weights are bf16, unless `indexer`
    quantises keys. Sliding-window layers of the model itself are not known here.

    Args:
        hidden_size, heads, kv_heads, head_dim: of the dense model.
        topk, window, topk_blocks, block_size: of the selection, in compressed positions, tokens, and blocks.
        kv_format: storage of the model's keys and values.
    Raises:
        ValueError: values that do not fit together.
    """
    c, inputs = indexer, indexer.q_lora_rank or hidden_size
    latent = 0 if c.q_lora_rank is None else hidden_size * c.q_lora_rank
    ratios = sorted({ratio for ratio in topology.compress_ratios if ratio})
    if len(ratios) > 1:
        raise ValueError(f"compress_ratios={list(topology.compress_ratios)}: attached indexers share one ratio")
    compressor = hidden_size * c.head_dim * (1 if ratios == [1] else 2)  # at ratio 1 there is no gate
    index = IndexShape(
        c.index_n_heads,
        c.index_head_dim,
        entry_bytes((_stored(c.quant), c.index_head_dim)),
        query_parameters=latent + inputs * c.index_n_heads * c.index_head_dim + hidden_size * c.index_n_heads,
        key_token_parameters=compressor,
        key_position_parameters=c.head_dim * c.index_head_dim,
    )
    entry = entry_bytes((kv_format, 2 * kv_heads * head_dim))
    return Architecture(
        name,
        layers_of(topology, compressed=False),
        heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        entry_bytes=entry,
        window_entry_bytes=entry,
        window=window,
        topk=topk,
        index=index,
        compressed=False,
        topk_blocks=topk_blocks,
        block_size=block_size,
    )


def _deepseek_v4(name: str, ratios: list[int], hidden: int, heads: int, q_lora_rank: int, topk: int) -> Architecture:
    """CSA (ratio 4: indexer, top-k) and HCA (ratio 128: every entry attended, no indexer) layers, each with its own KV.

    Main entry: 448 channels in e4m3 with a power-of-two scale per 64, the 64 RoPE channels in bf16, and a byte of
    padding. Index entry: 128 e2m1 with a power-of-two scale per 32, as the model computes it (serving stacks may store
    132 bytes of fp8 instead). Index keys have a compressor of their own, whose overlapping groups double its width.
    """
    layers = {
        0: Layer("window", 0, False, False),
        4: Layer("scan", 4, True, True),
        128: Layer("dense", 128, True, False),
    }
    entry = entry_bytes(("fp8_ue8m0_64", 448), ("bf16", 64), padding_bytes=1)
    index = IndexShape(
        64,
        128,
        entry_bytes(("fp4_ue8m0", 128)),
        query_parameters=q_lora_rank * 64 * 128 + hidden * 64,
        key_token_parameters=2 * hidden * 2 * 128,
        weight_bytes=FP8,
    )
    return Architecture(
        name,
        tuple(layers[ratio] for ratio in ratios),
        heads=heads,
        head_dim=512,
        value_dim=512,
        entry_bytes=entry,
        window_entry_bytes=entry,
        window=128,
        topk=topk,
        index=index,
        compressed=True,
    )


def _v4_flash() -> Architecture:
    """Two window layers, then CSA and HCA in turn: 21 and 20 of them."""
    return _deepseek_v4("v4_flash", [0, 0, *[4, 128] * 20, 4], hidden=4096, heads=64, q_lora_rank=1024, topk=512)


def _v4_pro() -> Architecture:
    """Two HCA layers, then CSA and HCA in turn: 30 and 31 in all."""
    return _deepseek_v4("v4_pro", [128, 128, *[4, 128] * 29, 4], hidden=7168, heads=128, q_lora_rank=1536, topk=1024)


def _v32() -> Architecture:
    """Multi-head latent attention in its absorbed form: 576 channels a product, 512 a value, one latent for all heads.

    Main entry: 512 e4m3 with a float32 scale per 128, and 64 RoPE channels in bf16. Index entry: 128 e4m3, one scale.
    """
    index = IndexShape(
        64,
        128,
        entry_bytes(("fp8_e4m3_128", 128)),
        query_parameters=1536 * 64 * 128 + 7168 * 64,
        key_position_parameters=7168 * 128,
        weight_bytes=FP8,
    )
    entry = entry_bytes(("fp8_e4m3_128", 512), ("bf16", 64))
    return Architecture(
        "v32",
        (Layer("scan", 1, True, True),) * 61,
        heads=128,
        head_dim=576,
        value_dim=512,
        entry_bytes=entry,
        window_entry_bytes=entry,
        window=0,
        topk=2048,
        index=index,
        compressed=True,
    )


def _smollm2() -> Architecture:
    """SmolLM2-135M with an indexer of the default shape on every layer, ratio 1, top-64 and a window of 128."""
    return attached(
        "smollm2",
        Topology.attached(30, 1),
        IndexerConfig(),
        hidden_size=576,
        heads=9,
        kv_heads=3,
        head_dim=64,
        topk=64,
        window=128,
    )


PRESETS: Mapping[str, Callable[[], Architecture]] = {
    "v41_flash": lambda: deepseek_v41(SIZES["flash"], "v41_flash"),
    "v4_flash": _v4_flash,
    "v4_pro": _v4_pro,
    "v32": _v32,
    "smollm2": _smollm2,
}


def preset(name: str) -> Architecture:
    """A published model by name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset={name!r}: must be one of {', '.join(PRESETS)}")
    return PRESETS[name]()


def _stored(quant: str) -> str:
    """The storage of a fake-quantisation format; unquantised values are bf16."""
    return "bf16" if quant == "none" else quant
