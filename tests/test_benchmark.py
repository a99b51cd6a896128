"""The benchmark's own parts: its grids, its plain script, its ratios; and a whole small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make

from sparsity_lab import benchmark
from sparsity_lab.cells import grid

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("count", [1, 20, 200])
def test_grids_have_the_promised_size(count):
    cells = benchmark.bench_cells(count)
    assert len(cells) == len(set(cells)) == count
    assert all(cell.selection.candidate for cell in cells)
    if count == 200:
        assert {c.selection.candidate.source_layer for c in cells} == {4, 8, 12}
    with pytest.raises(ValueError, match="cells=7"):
        benchmark.bench_cells(7)


def test_plain_script_agrees_with_the_library(tmp_path):
    """Recency at ratio 1, every row: the script's numbers are ours."""
    import sparsity_lab as sl

    model = sl.load_model(str(make("llama", tmp_path)), device="cpu")
    docs = sl.data.pydoc(model.tokenizer, num_documents=1, length=64)
    cells = grid("recency", topk=[4, 9], compress_ratio=1)
    before = model.model.config._attn_implementation
    rows = benchmark.eager_script(model.model, [d.tokens for d in docs], cells)
    assert model.model.config._attn_implementation == before
    table = sl.measure(model, docs, cells, rows=None, envelope=False).frame()
    for found, wanted in zip(rows, table.sort_values(["topk", "layer"]).to_dict("records"), strict=True):
        assert found["recall"] == pytest.approx(wanted["recall"], abs=1e-6)
        assert found["coverage"] == pytest.approx(wanted["coverage"], abs=1e-6)


def test_ratios_come_from_the_same_length():
    rows = [
        {"case": "forward", "length": 64, "seconds": 2.0, "peak_mib": 1},
        {"case": "cells_1", "length": 64, "seconds": 3.0, "peak_mib": 10},
        {"case": "cells_200", "length": 64, "seconds": 4.5, "peak_mib": 11},
        {"case": "cells_200", "length": 128, "seconds": 99.0, "peak_mib": 99},
        {"case": "jobs_basic", "length": 64, "seconds": 8.0, "jobs": 4},
    ]
    found = benchmark.ratios(rows, 64)
    assert found["1 cell / plain forward, time"] == 1.5
    assert found["200 cells / 1 cell, time"] == 1.5
    assert found["200 cells / 1 cell, peak memory"] == 1.1
    assert found["200 one-cell jobs (extrapolated) / 200 cells, time"] == pytest.approx(8 / 4 * 200 / 4.5)


def test_small_run_writes_a_record(tmp_path):
    folder = make("llama", tmp_path / "model", num_hidden_layers=10)
    words = ["model=hf", f"model.path={folder}", "model.device=cpu", "data.length=64", "lengths=[]", "repeats=1"]
    words += [
        "cases=[forward,cells_1,unchecked_1]",
        f"record={tmp_path / 'record.json'}",
        "hydra.run.dir=" + str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "bench.py"), *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["case"] for row in record["cases"]] == ["forward", "cells_1", "unchecked_1"]
    assert all(row["seconds"] > 0 and row["peak_mib"] > 100 for row in record["cases"])
    assert record["versions"]["torch"] == torch.__version__
    assert {"command", "date", "device", "git"} <= set(record)
    assert "1 cell / plain forward, time" in done.stdout
