"""Small indexers of every style and a stack of index layers that share keys and a pool; for the indexer tests."""

import dataclasses

import torch
from golden_cases import as_mask

from sparsity_lab.compressor import Compressor, CompressorState
from sparsity_lab.index_state import IndexRole, SharedIndexState
from sparsity_lab.indexer import Indexer
from sparsity_lab.rope import precompute_freqs_cis

DIM, HEADS, WIDTH, ROPE, RANK = 24, 4, 32, 8, 16
LENGTH = 26
V41 = {"rope_layout": "adjacent", "rope_place": "last"}
V32 = {"rope_layout": "half", "rope_place": "first", "hadamard": True, "key_norm": "layer"}
STYLES = {
    "v4.1": V41,
    "v3.2": {**V32, "quant": "none"},
    "v3.2_fp4": V32,
    "adjacent_first": {"rope_layout": "adjacent", "rope_place": "first", "quant": "none"},
    "half_last": {"rope_layout": "half", "rope_place": "last", "quant": "fp8_ue8m0"},
    "no_relu": {**V41, "relu": False},
}
TABLE = precompute_freqs_cis(ROPE, 64, 0, 160000.0, 16.0, 32, 1)


def make(owner: bool = True, width: int = WIDTH, seed: int = 0, latent: int = 12, **style) -> Indexer:
    torch.manual_seed(seed)
    indexer = Indexer(DIM, HEADS, width, ROPE, RANK, latent if owner else None, 1e-6, **(style or V41))
    for name, p in indexer.named_parameters():
        torch.nn.init.normal_(p, std=0.5) if "norm" not in name else torch.nn.init.uniform_(p, 0.5, 1.5)
    return indexer.requires_grad_(False)


@dataclasses.dataclass
class Stack:
    """Four layers: an owner, a candidate source and consumer reading its keys, and a second owner at another ratio."""

    ratio: int
    style: dict
    topk: int = 3

    def __post_init__(self) -> None:
        pool = {"topk_blocks": 2, "block_size": 2}
        other = 3 if self.ratio != 3 else 2
        self.roles = [
            IndexRole(0, 0, self.ratio, self.topk),
            IndexRole(1, 0, self.ratio, self.topk, "source", **pool),
            IndexRole(2, 0, self.ratio, self.topk, "consumer"),
            IndexRole(3, 3, other, self.topk),
        ]
        self.layers = [make(role.owner == role.layer, seed=role.layer, **self.style) for role in self.roles]
        torch.manual_seed(7)
        self.compressors = {role.layer: Compressor(DIM, 12, role.ratio, 1e-6) for role in self.roles}

    def run(self, x, qr, cuts=(), offset=0):
        """Selections of every layer, [layer][b, s] as sets of positions, whatever the calls."""
        state = SharedIndexState()
        carried = {layer: CompressorState() for layer in range(4)}
        out, start = [[] for _ in self.roles], 0
        for piece, qr_piece in zip(x.tensor_split(cuts, 1), qr.tensor_split(cuts, 1), strict=True):
            if not piece.shape[1]:
                continue
            for role, layer in zip(self.roles, self.layers, strict=True):
                latent = None
                if role.owner == role.layer:
                    latent = self.compressors[role.layer](piece, carried[role.layer])
                picks = layer(piece, qr_piece, latent, start, TABLE, state, role, offset)
                assert picks.shape[-1] == min(self.topk, (start + piece.shape[1]) // role.ratio)
                out[role.layer].append(as_mask(picks, offset, LENGTH))
            start += piece.shape[1]
        return torch.stack([torch.cat(o, dim=1) for o in out]), state


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """(x [2, LENGTH, DIM], qr [2, LENGTH, RANK]), always the same."""
    torch.manual_seed(3)
    return torch.randn(2, LENGTH, DIM), torch.randn(2, LENGTH, RANK)
