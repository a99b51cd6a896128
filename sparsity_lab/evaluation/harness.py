"""Tasks of lm-evaluation-harness, run dense and under each cell: `pip install 'sparsity-lab[harness]'`.

    import lm_eval
    from sparsity_lab.evaluation.harness import HarnessModel
    lm_eval.simple_evaluate(HarnessModel(sparse_model), tasks=["arc_easy"])

Imported only where it is used; its datasets come from wherever the task definitions say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsity_lab.evaluation.tables import EvaluationStore
from sparsity_lab.job import ProgressFactory

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise ValueError(
        "evaluation.harness.tasks: lm-evaluation-harness is not installed; pip install 'sparsity-lab[harness]'"
    ) from error

log = logging.getLogger("sparsity_lab")
DEFAULT_LENGTH = 2048  # tokens, for models that do not say for how many they were made
MAX_NEW_TOKENS = 256  # where a task does not say


class HarnessModel(TemplateLM):
    """The harness's view of a dense or sparse model with `logits`, `generate` and a tokenizer: one document at a time.

    What is longer than the model was made for is cut on the left, as the harness does for its own models.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.tokenizer = model, model.tokenizer
        self.max_length = model.max_length or DEFAULT_LENGTH

    @property
    def eot_token_id(self) -> int:
        """End of text, which also stands before a text that has nothing before it."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"evaluation.harness: the tokenizer of {self.model.name} has no end-of-text token")
        return int(end)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """Part of the harness's cache keys."""
        return str(self.model.name)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a string."""
        found = self.tokenizer(string, add_special_tokens=bool(add_special_tokens), verbose=False)["input_ids"]
        return [int(i) for i in found]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-probability of a continuation, and whether greedy decoding would give it."""
        if len(continuation) > self.max_length:
            raise ValueError(
                f"evaluation.harness: a continuation of {len(continuation)} tokens exceeds {self.max_length}"
            )
        whole = [*context, *continuation][-(self.max_length + 1) :]
        rows = self.model.logits(torch.tensor([whole[:-1]]))[-len(continuation) :].log_softmax(-1)
        wanted = torch.tensor(continuation, device=rows.device)
        total = rows.gather(-1, wanted.unsqueeze(-1)).double().sum()
        return float(total), bool((rows.argmax(-1) == wanted).all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts: in windows of the model's length without overlap, each conditioned on the
        token before it."""
        return [sum(self._rolling(*request.args)) for request in requests]

    def _rolling(self, string: str) -> list[float]:
        tokens = self.tok_encode(string)
        before, found = self.prefix_token_id, []
        for start in range(0, len(tokens), self.max_length):
            window = tokens[start : start + self.max_length]
            found.append(self._score([before], window)[0])
            before = window[-1]
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string or the tokens a task allows."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        options = dict(options)
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        new = int(options.pop("max_gen_toks", MAX_NEW_TOKENS))
        if new >= self.max_length:
            raise ValueError(f"evaluation.harness: max_gen_toks={new} leaves no room in {self.max_length} tokens")
        prompt = self.tok_encode(context)[-(self.max_length - new) :] or [self.prefix_token_id]
        if not options.get("do_sample"):
            options = {}  # a temperature of 0 and the like mean greedy decoding, the default
        out: Tensor = self.model.generate(torch.tensor([prompt]), new, **options)
        text = str(self.tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
        ends = [place for stop in until if stop and (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text


def scores(model: Any, tasks: Sequence[str], *, limit: int | None, include_path: str | None) -> dict[Any, Any]:
    """(task, metric) -> (value, items), of a dense or sparse model.

    Raises:
        ValueError: a task that the harness does not have.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(
            f"evaluation.harness.tasks={unknown}: the harness has no such tasks; lm_eval ls tasks lists them"
        )
    found = lm_eval.simple_evaluate(
        HarnessModel(model), tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    out = {}
    for task, metrics in found["results"].items():
        items = found["n-samples"].get(task, {}).get("effective", 0)
        for name, value in metrics.items():
            metric = name.split(",")[0]
            if isinstance(value, (int, float)) and metric != "sample_len" and not metric.endswith("_stderr"):
                out[task, metric] = (float(value), int(items))
    return out


def run(
    model: Any,
    cells: Mapping[str, Any],
    store: EvaluationStore,
    *,
    progress: ProgressFactory,
    tasks: Sequence[str],
    limit: int | None,
    include_path: str | None,
) -> None:
    """Run the tasks that the store lacks, dense once for all cells."""
    from sparsity_lab.models.sparse import SparseModel

    names = {task: task if limit is None else f"{task}, first {limit}" for task in tasks}
    done = store.done("harness", "task")
    todo = {key: [task for task in tasks if (key, names[task]) not in done] for key in cells}
    todo = {key: missing for key, missing in todo.items() if missing}
    needed = sorted({task for missing in todo.values() for task in missing})
    if not needed:
        return
    options: dict[str, Any] = {"limit": limit, "include_path": include_path}
    with progress(f"{model.name}, {', '.join(needed)}") as advance:
        dense = scores(model, needed, **options)
        advance(1, len(todo) + 1)
        for number, (key, missing) in enumerate(todo.items()):
            placed = cells[key]
            sparse = SparseModel(model, placed.cell.selection, placed.scorer, placed.layers)
            try:
                found = scores(sparse, missing, **options)
            except ValueError as error:
                log.warning("cell failed: %s: %s", placed.cell.label(), error)
                store.register({}, [{**placed.cell.fields(), "reason": str(error)}])
                found = {}
            rows = [
                {"cell_id": key, "task": names.get(task, task), "metric": metric, "dense": dense[task, metric][0],
                 "value": value, "items": items}
                for (task, metric), (value, items) in found.items()
            ]  # fmt: skip
            store.add({"harness": rows})
            advance(number + 2, len(todo) + 1)
