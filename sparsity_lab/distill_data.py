"""What indexers are trained on: a weighted mix of sources, and the guard that keeps it apart from held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsity_lab import data
from sparsity_lab.documents import Document, Documents


@dataclass(frozen=True)
class Mixture:
    """Sources by label, with the share of draws each gets (any positive weights)."""

    sources: Mapping[str, Documents]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for label in self.sources:
            if not self.weights[label] > 0:
                raise ValueError(f"data.train.{label}.weight={self.weights[label]}: must be above 0")
        if not self.sources:
            raise ValueError("data.train=[]: needs at least one source")

    def order(self, count: int, seed: int) -> list[Document]:
        """The first `count` documents of training: a source is drawn by weight each time, and every source is gone
        through whole, in a new order each time round. Fixed by the seed alone."""
        labels = list(self.sources)
        weights = np.array([self.weights[label] for label in labels], dtype=np.float64)
        drawn = np.random.default_rng(seed).choice(len(labels), size=count, p=weights / weights.sum())
        used = [0] * len(labels)
        orders: dict[tuple[int, int], np.ndarray] = {}
        found = []
        for source in drawn.tolist():
            documents = self.sources[labels[source]]
            time_round, place = divmod(used[source], len(documents))
            if (source, time_round) not in orders:
                generator = np.random.default_rng([seed, source, time_round])
                orders[source, time_round] = generator.permutation(len(documents))
            found.append(documents[int(orders[source, time_round][place])])
            used[source] += 1
        return found

    def describe(self) -> dict[str, Any]:
        """Label -> the source, how many documents, and its weight."""
        return {k: {**describe(docs), "weight": self.weights[k]} for k, docs in self.sources.items()}


def describe(documents: Documents) -> dict[str, Any]:
    """A source and how many documents of it there are."""
    return {**documents.source, "num_documents": len(documents)}


def load_sources(
    settings: Sequence[Mapping[str, Any]], tokenizer: Any, length: int, where: str
) -> tuple[dict[str, Documents], dict[str, float]]:
    """(label -> documents, label -> weight) of sources as a configuration names them: `name`, `label` (the name unless
    given), `weight` (1) and the options of that source in `sparsity_lab.data` but for the length, which all share.

    Raises:
        ValueError: a label given twice, or whatever the source raises, with the label.
    """
    documents, weights = {}, {}
    for number, given in enumerate(settings):
        options = dict(given)
        if "name" not in options:
            raise ValueError(f"{where}.{number}.name: missing, must be a source such as pydoc, stdlib, text, tokens")
        name = options.pop("name")
        label = options.pop("label", name)
        if label in documents:
            raise ValueError(f"{where}.{number}.label={label}: given twice; name the sources apart with label")
        weights[label] = options.pop("weight", 1.0)
        try:
            documents[label] = data.load(name, tokenizer, length=length, **options)
        except ValueError as error:
            raise ValueError(f"{where}.{label}: {error}") from error
    return documents, weights


def check_apart(train: Mapping[str, Documents], held_out: Mapping[str, Documents]) -> None:
    """Raise ValueError unless no text can be in both: equal documents, or documents cut from the same text in another
    way (another length or seed), whose indices say nothing about each other."""
    seen = {document.id: label for label, documents in train.items() for document in documents}
    for label, documents in held_out.items():
        for document in documents:
            if document.id in seen:
                raise ValueError(
                    f"data.held_out.{label}: document {document.index} is in data.train.{seen[document.id]} too; "
                    "leave it out with skip or num_documents"
                )
        for other, trained in train.items():
            one, two = documents.source, trained.source
            same_text = one.get("digest") is not None and one["digest"] == two.get("digest")
            if same_text and differing(one, two, ("length", "seed")):
                raise ValueError(
                    f"data.held_out.{label}: cut from the same text as data.train.{other}, but with another "
                    f"{differing(one, two, ('length', 'seed'))[0]}, so both may hold the same passages"
                )


def differing(one: Mapping[str, Any], two: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """The keys in which two descriptions differ."""
    return [key for key in keys if one.get(key) != two.get(key)]
