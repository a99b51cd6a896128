"""Two processes of torchrun compute what one does; splits that do not divide are refused."""

import re
from pathlib import Path

import pytest
import torch
import v41_worker
from two_processes import CPU, torchrun
from v41_cases import UNQUANTISED, golden_io, golden_weights, manifest, random_tiny, tiny_config, write_folder

from sparsity_lab.models.deepseek_v41 import load
from sparsity_lab.models.deepseek_v41.init import random_model
from sparsity_lab.models.deepseek_v41.parallel import SINGLE, Shard, launched

DECISIONS = ("topk", "candidates", "experts.", "selected")


def run_ranks(out: Path, devices: dict[str, str]) -> list[dict[str, torch.Tensor]]:
    """What the two processes computed, with `devices` in their environment."""
    write_folder(out / "golden", manifest()[v41_worker.GOLDEN]["config"], golden_weights(v41_worker.GOLDEN))
    return torchrun(v41_worker, out, devices)


def test_two_processes_of_torchrun(tmp_path):
    """One test: xdist would start the processes once for every worker that gets a part of it."""
    check_ranks(tmp_path, run_ranks(tmp_path, CPU), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_through_nccl(tmp_path):
    check_ranks(tmp_path, run_ranks(tmp_path, {}), "cuda")


def check_ranks(tmp_path: Path, ranks: list[dict[str, torch.Tensor]], device: str) -> None:
    assert (tmp_path / "1.ended").exists(), "the second process ends when the first does"
    # the observations compared below came after these failures, and found the processes in step
    told = (tmp_path / "failures").read_text(encoding="utf-8")
    assert told == "the check of layer 3 failed; input_ids 5 to 999: the vocabulary has 0 to 383"

    loaded = load("tiny", dtype="float32", device=device, **UNQUANTISED)
    alone = v41_worker.computed(loaded, tmp_path / "golden", SINGLE) | v41_worker.observed(loaded)
    check_equal_to_one_process(ranks[0], alone)
    check_golden(ranks[0])
    check_same_bits(ranks)
    check_parts(ranks, {name: p.cpu() for name, p in loaded.model.named_parameters()})


def check_equal_to_one_process(got: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> None:
    """Logits, caches and observed activations; selections and candidate pools exactly."""
    assert len([name for name in alone if "selected" in name]) == 6
    assert {name for name in got if not name.startswith("part.")} - {"again"} == set(alone)
    for name, want in alone.items():
        if any(word in name for word in DECISIONS):
            assert torch.equal(got[name], want), name
        else:
            torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert torch.equal(got["again"], got["L7.output"]), "a second forward is served too"


def check_golden(got: dict[str, torch.Tensor]) -> None:
    """A quantised checkpoint, each process with its part."""
    io = golden_io(v41_worker.GOLDEN)
    torch.testing.assert_close(got["golden.logits"], io["logits_prefill"], rtol=0, atol=2e-5)
    for name in (name for name in io if name.startswith(("topk", "candidates", "experts."))):
        assert torch.equal(got[f"golden.{name}"], io[name]), name


def check_same_bits(ranks: list[dict[str, torch.Tensor]]) -> None:
    for name, tensor in ranks[1].items():
        if not name.startswith("part."):
            assert torch.equal(tensor, ranks[0][name]), name


def check_parts(ranks: list[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor]) -> None:
    """Each process holds its part of the same random weights, and only its part."""
    split = 0
    for name, p in whole.items():
        parts = [rank[f"part.{name}"] for rank in ranks]
        axis = next((axis for axis in range(p.dim()) if parts[0].shape[axis] != p.shape[axis]), None)
        split += axis is not None
        for part, want in zip(parts, [p, p] if axis is None else p.chunk(2, axis), strict=True):
            assert torch.equal(part, want), name
    # sink, wq_b, wo_a, wo_b, experts (2), shared expert (3) of 8 layers; wq_b and weights_proj of 3 indexers
    assert split == 8 * 9 + 3 * 2


INDIVISIBLE = {
    "num_attention_heads=3": {"num_attention_heads": 3, "o_groups": 1},
    "o_groups=1": {"o_groups": 1},
    "index_n_heads=3": {"index_n_heads": 3},
    "n_routed_experts=7": {"n_routed_experts": 7},
    "moe_intermediate_size=63": {"moe_intermediate_size": 63},
}


@pytest.mark.parametrize("what", INDIVISIBLE)
def test_indivisible_sizes_are_refused(what):
    config = tiny_config(**INDIVISIBLE[what])
    with pytest.raises(ValueError, match=re.escape(f"{what}: must be divisible by the 2 processes of torchrun")):
        random_model(config, shard=Shard(0, 2))


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == SINGLE == random_tiny().shard
    x = torch.ones(3)
    assert SINGLE.sum(x) is x
    assert SINGLE.gather(x, 0) is x
