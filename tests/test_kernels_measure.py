"""A whole pass with kernels gives what it gives without: in the interpreter here, on the card where there is one."""

import pandas as pd
import pytest
import torch

pytest.importorskip("triton")

from fake_model import FakeModel, documents

from sparsity_lab import kernels, selection
from sparsity_lab.cells import grid
from sparsity_lab.lightning import IndexerConfig, Lightning
from sparsity_lab.measurement import measure
from sparsity_lab.selection import NEG_INF, order_positions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def tallies(share: str) -> pd.DataFrame:
    model = FakeModel(num_layers=2, softcap=4.0)
    pool = [None, {"source_layer": 0, "topk_blocks": 4, "block_size": 2}]
    cells = grid("lightning", topk=[2, 5], compress_ratio=3, share=share, window=4, candidate=pool)
    cells += grid("random", topk=3, compress_ratio=1, share=share, window=4)
    scorers = {"lightning": Lightning(model, IndexerConfig(2, 16, 8, 16))}
    found = measure(model, documents(1, 40), cells, scorers=scorers, rows=6, detail_rows=2, envelope=False).tallies
    return found.sort_values(["cell_id", "layer", "bucket"]).reset_index(drop=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter; tests/test_gpu.py is for the card")
@pytest.mark.parametrize("share", ["layer", "kv_head"])
def test_kernels_change_nothing(share, monkeypatch):
    wanted = tallies(share)
    used = []
    monkeypatch.setattr(kernels, "usable", lambda where: used.append(where) or True)
    found = tallies(share)
    assert used
    pd.testing.assert_frame_equal(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 7, 40])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_the_order_on_a_gpu_is_that_on_a_cpu(limit, with_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "usable", lambda where: with_kernels)
    scores = torch.randint(-3, 9, (3, 4, 40)).float()
    scores[0, 0], scores[1, 1, 5:] = NEG_INF, NEG_INF
    scores[2] *= torch.tensor([1.0, -0.0]).repeat(20)
    wanted = order_positions(scores, limit)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch.equal(selection._order_on_device(scores.to(device), limit, torch.int64).cpu(), wanted)
