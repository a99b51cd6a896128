"""Two processes of torchrun train the model that one does, each with a whole model (ddp) or a part of it (fsdp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pretrain_worker
import pytest
import tiny_pretrain
import torch
from pretrain_worker import SCHEDULE, SHAPE, STEPS, ways
from torch.distributed import fsdp
from two_processes import CPU, torchrun

from sparsity_lab.models.deepseek_v41 import load
from sparsity_lab.pretrain import KEPT
from sparsity_lab.pretrain_recipe import PretrainRecipe
from sparsity_lab.pretrain_run import PretrainRun, PretrainSchedule
from sparsity_lab.pretrain_shard import shard, usable

Ranks = list[dict[str, Any]]
OLD = not usable()


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="fsdp needs torch 2.7")
def test_two_processes_of_torchrun(tmp_path):
    """One test: xdist would start the processes once for every worker that gets a part of it."""
    check(tmp_path, torchrun(pretrain_worker, tmp_path, CPU), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(OLD, reason="fsdp needs torch 2.7")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_through_nccl(tmp_path):
    """There index scores tied at 0 may be selected otherwise, and sums have no fixed order."""
    check(tmp_path, torchrun(pretrain_worker, tmp_path, {}), "cuda")


def check(out: Path, ranks: Ranks, device: str) -> None:
    schedule = PretrainSchedule(**SCHEDULE)
    run = tiny_pretrain.run(out / "alone", schedule=schedule, shape=SHAPE, steps=STEPS, device=device)
    run.run()
    check_run(out, ranks[0], run)
    check_resumed(out, ranks[0], device)
    check_halves(ranks, run)
    for name, changes in {"ddp": {"steps": STEPS}, **ways(out)}.items():
        alone = pretrain_worker.curve(tiny_pretrain.trainer(SHAPE, device=device, **changes))
        check_curve(name, ranks[0][name], alone, device)


def check_run(out: Path, first: dict[str, Any], run: PretrainRun) -> None:
    """The same losses, held-out figures and weights as of one process, and a model that loads."""
    cpu = run.trainer.device.type == "cpu"
    for table in ("losses", "training"):
        got, want = (pd.read_csv(out / folder / f"{table}.csv") for folder in ("fsdp", "alone"))
        columns = [name for name in want if name not in ("seconds", "tokens_per_second", "peak_share")]
        rtol, atol = (1e-4, 1e-5) if cpu else (2e-2, 2e-2)
        pd.testing.assert_frame_equal(got[columns], want[columns], rtol=rtol, atol=atol)
    model = load(path=str(out / "fsdp" / "model"), dtype="float32", device="cpu").model
    for name, want in run.trainer.model.named_parameters():
        whole = first["weights"][name].cpu()
        if cpu:
            torch.testing.assert_close(whole, want.detach(), rtol=1e-3, atol=1e-4, msg=name)
        assert torch.equal(model.get_parameter(name), whole if name.endswith(KEPT) else whole.bfloat16().float()), name


def check_resumed(out: Path, first: dict[str, Any], device: str) -> None:
    """To the last bit where sums have an order, and only as it was begun."""
    if device == "cpu":
        for name in ("losses.csv", "model/model-00001.safetensors"):
            assert (out / "parts" / name).read_bytes() == (out / "fsdp" / name).read_bytes()
    got, want = (pd.read_csv(out / name / "losses.csv") for name in ("parts", "fsdp"))
    pd.testing.assert_frame_equal(got, want, rtol=2e-2)
    assert "holds a run with recipe.parallel=fsdp, not ddp" in first["refusal"]
    assert not (out / "parts" / "checkpoint.pt").exists()


def check_halves(ranks: Ranks, run: PretrainRun) -> None:
    """Each process holds its part of weights and optimiser state; whole weights only the first one, when it asks."""
    whole = pretrain_worker.held(run.trainer)
    for size, parts in zip(whole, zip(*(rank["held"] for rank in ranks), strict=True), strict=True):
        assert size <= sum(parts) < 1.1 * size, "what stays whole is small"
        assert 0.45 * size < parts[0] < 0.6 * size
    assert ranks[1]["weights"] == {}


def check_curve(name: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], device: str) -> None:
    """In bfloat16 each process rounds gradients of its own."""
    rtol, atol = (1e-3, 1e-4) if device == "cpu" and name != "bfloat16" else (2e-2, 2e-2)
    assert set(got) == set(want)
    for key, tensor in want.items():
        if device == "cpu" or key in ("languages", "norms"):
            torch.testing.assert_close(got[key], tensor, rtol=rtol, atol=atol, msg=lambda m, k=key: f"{name}: {k}: {m}")


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match=r"recipe\.parallel='zero': must be one of ddp, fsdp"):
        PretrainRecipe(steps=1, parallel="zero")
    with pytest.raises(ValueError, match=r"recipe\.parallel=fsdp: .* torchrun; there is only one"):
        tiny_pretrain.trainer(parallel="fsdp")


def test_an_old_torch_is_told(monkeypatch):
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, *, mesh, mp_policy, reshard_after_forward: None)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"recipe\.parallel=fsdp: needs torch 2\.7 or newer, this is "):
        shard(model, [], [], device=torch.device("cpu"), dtype=torch.float32, gathers_twice=False)
