"""Next-token distributions of the same model run dense and sparse over one document, row by row.

A forward is kept as its final hidden states, t x dim numbers; logits are made of them a few rows at a time, so no
t x vocabulary array ever exists, and the dense forward of a document serves every cell.

Shapes: t tokens, dim hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import LayerActivations, ObservableModel
from sparsity_lab.cells import Selection
from sparsity_lab.checks import CheckError
from sparsity_lab.metrics import raw_start
from sparsity_lab.models.hf import HFModel
from sparsity_lab.selection import visible_lengths

STRETCH = 128  # rows whose logits exist at once
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Forward:
    """What a forward leaves: final hidden states [t, dim] and, by layer, what attention added to the residual stream
    (after the output projection) at some rows, float32 [R, dim]."""

    hidden: Tensor
    outputs: dict[int, Tensor]


@dataclass(frozen=True)
class Comparison:
    """Row s predicts token s + 1, so a document of t tokens has t - 1 rows: float64 [t - 1], losses in nats."""

    dense_loss: Tensor
    loss: Tensor
    kl: Tensor  # KL(dense || sparse)
    agreement: Tensor  # 1 where both find the same token likeliest


def run(runs: ObservableModel, model: HFModel, tokens: Tensor, layers: Collection[int], rows: Tensor) -> Forward:
    """Run one document through the backbone.

    Args:
        runs: `model` itself, or a sparse model made of it; tokens: int64 [t]; layers: whose attention output at `rows`
            is kept.
    """
    with _listening(model, layers, rows) as (final, outputs):
        runs.observe(tokens.unsqueeze(0), _look_away, layers)
    return Forward(final[0], outputs)


def _look_away(acts: LayerActivations) -> None:
    """Nothing of the layer itself is needed."""


@contextmanager
def _listening(
    model: HFModel, layers: Collection[int], rows: Tensor
) -> Iterator[tuple[list[Tensor], dict[int, Tensor]]]:
    final: list[Tensor] = []
    outputs: dict[int, Tensor] = {}

    def keep_final(module: nn.Module, args: tuple, output: Any) -> None:
        final[:] = [output[0][0]]

    def keep_output(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            outputs[layer] = tensor.view(-1, tensor.shape[-1])[rows.to(tensor.device)].float()

        return hook

    with ExitStack() as stack:
        stack.callback(model.model.get_decoder().register_forward_hook(keep_final).remove)
        for layer in layers:
            stack.callback(model.attention_module(layer).register_forward_hook(keep_output(layer)).remove)
        yield final, outputs


class _Final:
    """Stands for a backbone's output of which only the final hidden states matter."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


@torch.inference_mode()
def logits(causal: Any, hidden: Tensor) -> Tensor:
    """Final hidden states [R, dim] -> float32 [R, V], by the family's own code for what comes after its backbone."""
    decoder = causal.get_decoder()
    decoder.forward = lambda *args, **kwargs: _Final(hidden.unsqueeze(0))
    try:
        tokens = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=hidden.device)
        return causal(input_ids=tokens, use_cache=False).logits[0].float()
    finally:
        del decoder.forward


@torch.inference_mode()
def check_head(model: HFModel, tokens: Tensor) -> None:
    """Logits made of final hidden states must be the model's own, else its family keeps its head elsewhere.

    Raises:
        CheckError: they differ.
    """
    few = tokens[:CHECKED_TOKENS].to(model.device)
    ours, theirs = logits(model.model, run(model, model, few, [], few[:0]).hidden), model.logits(few.unsqueeze(0))
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
        raise CheckError(f"model={model.name}: logits rebuilt from its final hidden states are not its own")


def compare(causal: Any, dense: Forward, sparse: Forward, tokens: Tensor) -> Comparison:
    """Both forwards of one document, tokens int64 [t]."""
    parts: list[Tensor] = []
    targets = tokens[1:].to(dense.hidden.device)
    for start in range(0, len(targets), STRETCH):
        rows = slice(start, min(start + STRETCH, len(targets)))
        p, q = (logits(causal, forward.hidden[rows]).log_softmax(-1) for forward in (dense, sparse))
        wanted = targets[rows].unsqueeze(-1)
        losses = [-x.gather(-1, wanted).squeeze(-1) for x in (p, q)]
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
        parts.append(torch.stack([*losses, kl, (p.argmax(-1) == q.argmax(-1)).float()]).double())
    return Comparison(*torch.cat(parts, dim=-1))


def output_errors(dense: Forward, sparse: Forward) -> dict[int, float]:
    """Layer -> mean over rows of ‖a' − a‖₂ / ‖a‖₂, a being what the layer's attention adds to the residual stream when
    the model runs dense, a' when it runs sparse. Free-running: a layer's error holds that of the layers before it."""
    found = {}
    for layer, output in dense.outputs.items():
        distance = (sparse.outputs[layer] - output).norm(dim=-1)
        found[layer] = float((distance / output.norm(dim=-1).clamp_min(1e-30)).double().mean())
    return found


def selective(rows: Tensor, selection: Selection) -> Tensor:
    """Rows [R] at which a selection may leave something out, bool [R]: more positions are visible than it takes, and
    the window does not reach back to the first token. At all others sparse is dense."""
    beyond = visible_lengths(rows, selection.compress_ratio) > selection.topk
    return beyond & (raw_start(rows, selection.compress_ratio, selection.window) > 0)


def sums_by(keys: Sequence[Tensor], comparison: Comparison) -> list[dict[str, Any]]:
    """Sums and counts of a comparison by the distinct values of `keys` (int64 [t - 1] each), a dict a combination."""
    combined, place = torch.stack(list(keys), dim=1).unique(dim=0, return_inverse=True)
    values = torch.stack([comparison.dense_loss, comparison.loss, comparison.kl, comparison.agreement]).cpu()
    sums = torch.zeros(4, len(combined), dtype=torch.float64).index_add_(1, place, values)
    counts = place.bincount(minlength=len(combined))
    names = ("dense_loss_sum", "loss_sum", "kl_sum", "agreement_sum")
    out = []
    for i, found in enumerate(combined.tolist()):
        out.append({"keys": found, "rows": int(counts[i]), **dict(zip(names, sums[:, i].tolist(), strict=True))})
    return out
