"""What a placement of indexers costs: cache bytes a token of context, FLOPs and bytes of decoding and of a prefill,
and roofline times on named devices.

    model = preset("v41_flash")
    cache_bytes_per_token(model).total_bytes                    # 890.0
    frame(decode_costs(model, 131072), load_devices()["h200"])  # a row a part and kind of layer
    frame(decode_costs(dense_alternative(model), 131072), ...)  # the same caches, everything attended

Counted, for one sequence and one selection a layer: the indexer's own projections, index scores, the block level,
attention scores and values; cached entries, read once by the row of a decode step or once a tile of a prefill, and the
indexer's weights, read once a call.

Not counted: the model's own projections, experts and norms, which a placement does not change; softmax, ReLU and head
weighting (elementwise, a few operations for each product of head_dim); ranking scores for the top-k, taken to be fused
into the scan, so that scores never reach memory; reading queries, writing outputs and new entries. FLOPs run at the
device's one peak rate, whatever the storage format: low-precision entries are taken to be widened first. A roofline
time is therefore a lower bound to compare placements with, not a forecast.
"""

from sparsity_lab.cost.architecture import (
    Architecture,
    CacheBytes,
    IndexShape,
    Layer,
    cache_bytes_per_token,
    dense_alternative,
    entry_bytes,
    layers_of,
)
from sparsity_lab.cost.parts import PartCost, decode_costs, prefill_costs
from sparsity_lab.cost.presets import PRESETS, attached, deepseek_v41, preset
from sparsity_lab.cost.roofline import Device, frame, load_devices, part_seconds, total_seconds

__all__ = [
    "PRESETS",
    "Architecture",
    "CacheBytes",
    "Device",
    "IndexShape",
    "Layer",
    "PartCost",
    "attached",
    "cache_bytes_per_token",
    "decode_costs",
    "deepseek_v41",
    "dense_alternative",
    "entry_bytes",
    "frame",
    "layers_of",
    "load_devices",
    "part_seconds",
    "prefill_costs",
    "preset",
    "total_seconds",
]
