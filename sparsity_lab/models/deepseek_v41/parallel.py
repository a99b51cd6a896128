"""Tensor parallelism: which part of the heads and experts a process holds, and the sums that join the parts.

Attention heads, index heads, routed experts and the shared expert's width are split; embedding, norms, mixing
coefficients, the router and the head are whole everywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One process's place among `world`; the default process group is used."""

    rank: int = 0
    world: int = 1

    def part(self, size: int, name: str) -> int:
        """A rank's part of `size`.

        Raises:
            ValueError: the processes do not divide it.
        """
        if size % self.world:
            raise ValueError(f"{name}={size}: must be divisible by the {self.world} processes of torchrun")
        return size // self.world

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, the same bits on every rank."""
        if self.world == 1:
            return x
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", _everyone()))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' parts, joined along `dim`."""
        if self.world == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world)]
        dist.all_gather(parts, x.contiguous(), _everyone())
        return torch.cat(parts, dim)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """What the first process does in here, the others do after it."""
        if self.rank:
            dist.barrier()
        yield
        if self.world > 1 and not self.rank:
            dist.barrier()


SINGLE = Shard()


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "a split model needs torch.distributed"
    return group


def launched() -> Shard:
    """The place torchrun gave this process, joining the process group (NCCL with a GPU each, else gloo).

    Without torchrun: one process alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return SINGLE
    if not dist.is_initialized():
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # the others wait while the first process measures between two forwards
        dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(hours=6))
    return Shard(dist.get_rank(), dist.get_world_size())


def own_device(shard: Shard, device: str) -> str:
    """The name of the device a process uses: with several processes, auto means a GPU each."""
    if shard.world > 1 and device == "auto" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return device
