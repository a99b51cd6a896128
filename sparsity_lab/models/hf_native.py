"""Families of `transformers` that select with an indexer of their own: what it computed, read off its own modules.

Forward hooks note what the indexer's submodules were given and gave; queries and keys are rotated by the family's own
function. Nothing is taken on trust: at every observation the scores that follow are held against the top-k that the
indexer itself returned. Where it returned everything, it is asked once more with a smaller budget.

Source: `transformers`' deepseek_v32, glm_moe_dsa and deepseek_v4 (their indexers have neither the Hadamard rotation nor
the quantisation of the published inference code).
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsity_lab.activations import CompressedKeys, IndexActivations, LayerActivations
from sparsity_lab.indexer import index_scores
from sparsity_lab.selection import visible_lengths
from sparsity_lab.topology import NativeSelection, Topology

ATTENTION = ("native", "dense")
CHECKED_ROWS = 64  # queries of an index source whose top-k is compared, spread over the document
SLACK = 1e-5  # of the largest sum of magnitudes: float32 sums in another order


@dataclass(frozen=True)
class Call:
    """One call of a module."""

    arguments: Mapping[str, Any]
    output: Any


Calls = dict[str, Call]  # by the module's name inside the indexer, "" = the indexer


@dataclass(frozen=True)
class Family:
    """Where a family keeps its indexer and how to read it."""

    indexer: str  # path inside the attention module
    parts: tuple[str, ...]  # its submodules that are listened to
    read: Callable[[Any, Calls], tuple[Tensor, Tensor, Tensor]]  # (indexer, calls) -> q, w, k of IndexActivations
    selection: Callable[[Any], NativeSelection]  # from the family's configuration


def _token_reader(rotary: str) -> Callable[[Any, Calls], tuple[Tensor, Tensor, Tensor]]:
    """For indexers over tokens; `rotary` names the family's function, which settles the layout of the pairs."""

    def read(indexer: Any, calls: Calls) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = calls[""].arguments["position_embeddings"]
        q = calls["wq_b"].output.unflatten(-1, (-1, indexer.head_dim))
        k = calls["k_norm"].output.unsqueeze(2)
        rotate, d = getattr(sys.modules[type(indexer).__module__], rotary), indexer.qk_rope_head_dim
        q_rotated, k_rotated = rotate(q[..., :d], k[..., :d], cos, sin, unsqueeze_dim=2)
        q = torch.cat([q_rotated, q[..., d:]], dim=-1)
        k = torch.cat([k_rotated, k[..., d:]], dim=-1).squeeze(2)
        w = calls["weights_proj"].output.float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        return q, w, k

    return read


def _read_scorer(indexer: Any, calls: Calls) -> tuple[Tensor, Tensor, Tensor]:
    """For indexers over compressed positions, whose last step is a module of its own."""
    given, scorer = calls["scorer"].arguments, indexer.scorer
    w = calls["scorer.weights_proj"].output.float() * (scorer.weights_scaling * scorer.softmax_scale)
    return given["q"], w, given["compressed_kv"]


def _token_selection(config: Any) -> NativeSelection:
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    sources = [layer for layer, kind in enumerate(kinds[: config.num_hidden_layers]) if kind == "full"]
    return NativeSelection(
        Topology.attached(config.num_hidden_layers, 1, sources), topk=config.index_topk, window=0, compressed=False
    )


def _compressed_selection(config: Any) -> NativeSelection:
    selecting = "compressed_sparse_attention"
    ratios = [config.compress_rates[selecting] if kind == selecting else 0 for kind in config.layer_types]
    sources = [layer for layer, ratio in enumerate(ratios) if ratio]
    topology = Topology(tuple(ratios), tuple(sources), tuple(sources))
    return NativeSelection(topology, topk=config.index_topk, window=config.sliding_window, compressed=True)


_TOKEN_PARTS = ("wq_b", "k_norm", "weights_proj")
FAMILIES = {
    "deepseek_v32": Family("indexer", _TOKEN_PARTS, _token_reader("apply_rotary_pos_emb"), _token_selection),
    "glm_moe_dsa": Family("indexer", _TOKEN_PARTS, _token_reader("apply_rotary_pos_emb_interleave"), _token_selection),
    "deepseek_v4": Family("compressor.indexer", ("scorer", "scorer.weights_proj"), _read_scorer, _compressed_selection),
}


def native_selection_of(config: Any) -> NativeSelection | None:
    """The selection a model with this `transformers` configuration was made with; None = it has none we know of."""
    config = config.get_text_config()
    family = FAMILIES.get(config.model_type)
    return family.selection(config) if family else None


def check_attention(attention: Any) -> None:
    """Raise ValueError unless `attention` is one of ATTENTION."""
    if attention not in ATTENTION:
        raise ValueError(f"model.attention={attention}: must be {' or '.join(ATTENTION)}")


class Tap:
    """Listens to a model's indexers during one forward over one whole document.

    Args:
        modules: layer -> attention module, of the index sources at least.
        dense: let every layer attend to all it can see, instead of its indexer's top-k.
    """

    def __init__(self, model_type: str, selection: NativeSelection, modules: Mapping[int, nn.Module], dense: bool):
        self.model_type, self.selection, self.modules, self.dense = model_type, selection, modules, dense
        self.family = FAMILIES[model_type]
        self._latest: tuple[IndexActivations, Tensor] | None = None

    @contextmanager
    def listening(self, layers: Collection[int]) -> Iterator[None]:
        """While open, `complete` can serve `layers`; the hooks are gone afterwards, also after an error."""
        topology = self.selection.topology
        wanted = {topology.index_source(layer) for layer in layers}
        with ExitStack() as stack:
            for source in topology.index_source_layers:
                indexer = self.modules[source].get_submodule(self.family.indexer)
                calls: Calls = {}
                parts = self.family.parts if source in wanted else ()
                for name in parts:
                    hook = indexer.get_submodule(name).register_forward_hook(_note(calls, name), with_kwargs=True)
                    stack.callback(hook.remove)
                if parts or self.dense:
                    hook = indexer.register_forward_hook(self._ended(source, calls, bool(parts)), with_kwargs=True)
                    stack.callback(hook.remove)
            yield

    def complete(self, acts: LayerActivations) -> LayerActivations:
        """`acts` with what a layer with sparse attention of its own has beside; as it is for layers without."""
        topology = self.selection.topology
        source, ratio = topology.index_source(acts.layer), topology.compress_ratios[acts.layer]
        if source is None:
            return acts
        if self._latest is None or self._latest[0].layer != source:
            raise ValueError(f"layer {acts.layer}: the indexer of layer {source} has not run; {self._hint()}")
        index, selected = self._latest
        acts = dataclasses.replace(acts, index=index, selected=None if self.dense else selected)
        if not self.selection.compressed:
            return acts
        t = acts.q.shape[2]
        if acts.k.shape[2] != t + t // ratio:
            raise ValueError(
                f"layer {acts.layer}: {acts.k.shape[2]} keys for {t} tokens, not {t} and {t // ratio} compressed ones; "
                + self._hint()
            )
        compressed = CompressedKeys(acts.k[:, :, t:], acts.v[:, :, t:], ratio)
        return dataclasses.replace(acts, k=acts.k[:, :, :t], v=acts.v[:, :, :t], compressed=compressed)

    def _ended(self, source: int, calls: Calls, read: bool) -> Callable:
        ratio = self.selection.topology.compress_ratios[source]

        def hook(indexer: Any, args: tuple, kwargs: dict, chosen: Tensor) -> Tensor | None:
            if read:
                calls[""] = _call(indexer, args, kwargs, chosen)
                index = self._read(source, ratio, indexer, calls)
                n = index.k.shape[1]
                telling = chosen
                if n > 1 and chosen.shape[-1] >= n:  # all of them: says nothing about scores
                    telling = _asked_again(indexer, max(1, n // 2), args, kwargs)
                self._check(index, telling)
                visible = visible_lengths(torch.arange(chosen.shape[1], device=chosen.device), ratio)
                self._latest = index, chosen.where(chosen < visible.unsqueeze(-1), -1).int()
                calls.clear()
            return _everything(chosen, ratio, self.selection.compressed) if self.dense else None

        return hook

    def _read(self, source: int, ratio: int, indexer: Any, calls: Calls) -> IndexActivations:
        try:
            q, w, k = self.family.read(indexer, calls)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"layer {source}: its indexer could not be read ({error!r}); {self._hint()}") from error
        return IndexActivations(source, q, w, k, ratio)

    def _check(self, index: IndexActivations, chosen: Tensor) -> None:
        """Raise ValueError unless no position left out scores above one that was chosen, rounding aside."""
        length, n = index.q.shape[1], index.k.shape[1]
        if not n:
            return
        rows = torch.linspace(0, length - 1, min(length, CHECKED_ROWS), device=chosen.device).long()
        scores, sizes = (
            index_scores(index.q[:, rows], index.k, w[:, rows], index.relu)[0] for w in (index.w, index.w.abs())
        )
        visible = visible_lengths(rows, index.ratio)
        hidden = torch.arange(n, device=rows.device) >= visible.unsqueeze(-1)
        places = chosen[0, rows].long()
        places = places.where((places >= 0) & (places < visible.unsqueeze(-1)), n)
        picked = torch.zeros(len(rows), n + 1, dtype=torch.bool, device=rows.device).scatter_(1, places, True)[:, :n]
        worst = scores.masked_fill(~picked, float("inf")).amin(-1)
        best = scores.masked_fill(picked | hidden, float("-inf")).amax(-1)
        right = (best - worst <= SLACK * sizes.amax(-1)) & (picked.sum(-1) == visible.clamp(max=chosen.shape[-1]))
        if not right.all():
            raise ValueError(
                f"layer {index.layer}: the scores rebuilt from the indexer's queries, keys and weights give another "
                f"top-k than the one it returned, first at row {int(rows[~right][0])}; {self._hint()}"
            )

    def _hint(self) -> str:
        import transformers

        return (
            f"{self.model_type} of transformers {transformers.__version__} does not work as sparsity_lab reads it "
            "(written for 5.17 to 5.24)"
        )


def _call(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Call:
    return Call(inspect.signature(module.forward).bind(*args, **kwargs).arguments, output)


def _note(calls: Calls, name: str) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        calls[name] = _call(module, args, kwargs, output)

    return hook


def _asked_again(indexer: Any, topk: int, args: tuple, kwargs: dict) -> Tensor:
    """The indexer's own top-k under another budget."""
    before = indexer.index_topk
    indexer.index_topk = topk
    try:
        return indexer.forward(*args, **kwargs)
    finally:
        indexer.index_topk = before


def _everything(chosen: Tensor, ratio: int, compressed: bool) -> Tensor:
    """All positions in the place of a top-k [b, s, k].

    Compressed ones are masked by nothing else, so those that a query cannot see are -1; tokens have their causal mask.
    """
    b, s, _ = chosen.shape
    positions = torch.arange(s // ratio, device=chosen.device)
    if not compressed:
        return positions.expand(b, s, -1)  # a view: s·n indices would outweigh the model's own mask
    visible = visible_lengths(torch.arange(s, device=chosen.device), ratio)
    return positions.where(positions < visible.unsqueeze(-1), -1).expand(b, s, -1)
