"""Weights, gradients and optimiser state in parts over the processes of torchrun (FSDP2), and whole again where needed.

The blocks and what is around them are gathered one after the other, as they compute. Every parameter is cut along its
first axis into parts of equal size, of which the last may be shorter or empty. What V4.1 keeps in float32 is small and
stays whole in every process; its gradients are averaged apart. Everything here also takes plain tensors, which are
their own part.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def usable() -> bool:
    """Whether this torch can leave parameters whole."""
    from torch.distributed.fsdp import fully_shard

    return "ignored_params" in inspect.signature(fully_shard).parameters


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    kept: Collection[nn.Parameter],
    *,
    device: torch.device,
    dtype: torch.dtype,
    gathers_twice: bool,
) -> None:
    """Cut the parameters of `root`, where it and each of its `blocks` is gathered when its forward is called.

    Args:
        kept: parameters that stay whole and as they are.
        dtype: what forwards see of the others; gradients are summed in float32.
        gathers_twice: free what was gathered after a forward and gather it again in the backward.
    Raises:
        ValueError: torch is too old to leave parameters whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not usable():
        raise ValueError(
            f"recipe.parallel=fsdp: needs torch 2.7 or newer, this is {torch.__version__}; ddp works with it"
        )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for parameter in kept:
        parameter.data = parameter.data.to(device)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=gathers_twice, ignored_params=set(kept))


class Opaque:
    """Stands for an object among a sharded module's arguments: of a dataclass its hooks would hand on a copy."""

    def __init__(self, meant: object) -> None:
        self._meant = meant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meant, name)


def free(root: nn.Module) -> None:
    """Drop what was gathered and is not needed any more, as after a forward without a backward."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This process's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All parts joined; every process has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    size = -(-len(tensor) // like.device_mesh.size())
    first = like.device_mesh.get_local_rank() * size
    return tensor[first : first + size]


def joined(own: Tensor, like: Tensor) -> Tensor:
    """A tensor of which `own` is this process's part, cut as `like` is."""
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Give all processes the mean of their gradients, of parameters that are whole."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        together = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(together)
        together /= dist.get_world_size()
        for grad, mean in zip(grads, together.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))


def clip(parameters: Sequence[nn.Parameter], most: float) -> Tensor:
    """Scale gradients down to a norm of `most`; their norm before, []."""
    cut = [p for p in parameters if isinstance(p, DTensor)]
    if not cut:
        return nn.utils.clip_grad_norm_(parameters, most)
    sides: list[Sequence[nn.Parameter]] = [cut, [p for p in parameters if not isinstance(p, DTensor)]]
    norms = [nn.utils.get_total_norm([p.grad for p in side if p.grad is not None]) for side in sides]
    norm = torch.linalg.vector_norm(torch.stack([whole(x).to(cut[0].device) for x in norms]))
    for side in sides:
        nn.utils.clip_grads_with_norm_(side, most, norm)
    return norm


def whole_state(tensors: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Values with their tensors whole, where they are cut then on the CPU; every process has to ask, and those that do
    not `keep` get none."""
    found = {}
    for name, value in tensors.items():
        cut = isinstance(value, DTensor)
        value = whole(value) if cut else value
        if keep:
            found[name] = value.cpu() if cut else value
    return found


def optimiser_state(optimiser: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """Its state_dict by `whole_state`."""
    state = optimiser.state_dict()
    return {**state, "state": {number: whole_state(values, keep) for number, values in state["state"].items()}}


def load_optimiser(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Take back what `optimiser_state` gave."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    own = {}
    for number, values in saved["state"].items():
        like = parameters[number]
        own[number] = {
            name: joined(part(value, like).to(like.device), like) if value.shape == like.shape else value
            for name, value in values.items()
        }
    optimiser.load_state_dict({**saved, "state": own})
