"""The real command line for tests, without paying for its imports each time.

`run` and `start` fork a process in which torch, transformers and Hydra are imported but nothing was used yet, and run
an entry point there as `__main__`; `shell` starts a new Python, as people do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

ROOT = Path(__file__).parent.parent
RECALL = ROOT / "experiments" / "recall.py"
PRELOAD = [
    "torch",
    "pandas",
    "pyarrow.parquet",
    "rich.table",
    "hydra",
    "hydra.main",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "transformers.integrations.accelerate",
    "sparsity_lab.console",
    "sparsity_lab.job",
    "sparsity_lab.data",
    "sparsity_lab.models.hf",
    "hydra_plugins.sparsity_lab.fused_launcher",
]
MACHINE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Run:
    """What a command left: exit code (negative: killed by that signal), output, and how many forwards it made."""

    code: int
    out: str
    err: str
    forwards: int

    @property
    def last(self) -> str:
        """The last line on stderr but for Hydra's hint to set HYDRA_FULL_ERROR."""
        lines = [line for line in self.err.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
        return lines[-1] if lines else ""


class Running:
    """A command that is at work."""

    def __init__(self, process: Any, folder: Path) -> None:
        self.process, self.folder = process, folder

    @property
    def forwards(self) -> int:
        """Forwards begun so far."""
        return (self.folder / "forwards").stat().st_size

    def finish(self, timeout: float = 120) -> Run:
        """Wait for its end."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"no end after {timeout} s:\n{self._text('err')}")
        return Run(self.process.exitcode, self._text("out"), self._text("err"), self.forwards)

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


def start(
    folder: Path,
    *args: str,
    flags: Sequence[str] = (),
    prepare: Callable[[], None] | None = None,
    script: Path = RECALL,
) -> Running:
    """Begin a command; what it prints is kept in a new folder below `folder`.

    flags: Hydra's own, which must come before the overrides `args`; prepare: importable, runs before the command.
    """
    number = len(list(folder.glob("command*"))) if folder.exists() else 0
    here = folder / f"command{number}"
    here.mkdir(parents=True)
    (here / "forwards").touch()
    _context.set_forkserver_preload(PRELOAD)
    old = {name: os.environ.get(name) for name in MACHINE}
    os.environ.update(MACHINE)  # the fork server inherits it, once
    try:
        process = _context.Process(target=_command, args=(str(script), [*flags, *args], str(here), prepare))
        process.start()
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return Running(process, here)


def run(folder: Path, *args: str, timeout: float = 120, **options: Any) -> Run:
    """A command from beginning to end."""
    return start(folder, *args, **options).finish(timeout)


def _command(script: str, args: Sequence[str], folder: str, prepare: Callable[[], None] | None) -> None:
    """In the forked process. A shell that runs tests in the background ignores SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, encoding="utf-8"))
    _count_forwards(Path(folder, "forwards"))
    if prepare is not None:
        prepare()
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _count_forwards(file: Path) -> None:
    from sparsity_lab.models.hf import HFModel

    observe = HFModel.observe

    def counted(self: HFModel, *args: Any, **options: Any) -> None:
        with file.open("a") as stream:
            stream.write(".")
        observe(self, *args, **options)

    HFModel.observe = counted


def shell(
    *args: str, script: Path = RECALL, timeout: float = 300, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """The same in a Python of its own."""
    command = [sys.executable, str(script), *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env={**os.environ, **MACHINE}
    )


def tiny(folder: Path) -> list[str]:
    """Make a tiny Llama in `folder`; the overrides that measure one cell on two short documents with it."""
    import tiny_models

    path = tiny_models.make("llama", folder / "llama")
    small = ["data.length=128", "data.num_documents=2", "measure.rows=32", "measure.detail_rows=4"]
    return ["model=hf", f"model.path={path}", *small, "selection.topk=4", "selection.compress_ratio=1"]


def tallies(folder: Path) -> pd.DataFrame:
    """The tallies of a results folder, in order."""
    from sparsity_lab.results import KEYS, load

    return load(folder).tallies.sort_values(KEYS, ignore_index=True)


def assert_same_tallies(one: pd.DataFrame, other: pd.DataFrame) -> None:
    """To the last bit, in any order."""
    from sparsity_lab.results import KEYS

    ordered = [frame.sort_values(KEYS, ignore_index=True) for frame in (one, other)]
    pd.testing.assert_frame_equal(*ordered, check_exact=True)


def wait_for(what: Callable[[], bool], timeout: float = 60) -> None:
    """Until `what` is true."""
    end = time.monotonic() + timeout
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {timeout} s")
        time.sleep(0.01)


def status(folder: Path) -> str:
    """What stands in the status of a results or job folder."""
    return (folder / "status").read_text(encoding="utf-8").strip()


# What can run before a command, in its process.


def slowly(seconds: float = 0.3) -> None:
    """Every forward takes a while, so that a test can act in the middle of a run."""
    from sparsity_lab.models.hf import HFModel

    observe = HFModel.observe

    def slow(self: HFModel, *args: Any, **options: Any) -> None:
        time.sleep(seconds)
        observe(self, *args, **options)

    HFModel.observe = slow


def die_at_write(number: int, late: bool) -> None:
    """kill -9 at the number-th file that is written whole: just before it gets its name, or just after."""
    from sparsity_lab import results

    write, written = results.write_atomically, 0

    def deadly(path: Path, writer: Callable[[Path], Any]) -> None:
        nonlocal written
        written += 1

        def then_die(temporary: Path) -> None:
            writer(temporary)
            os.kill(os.getpid(), signal.SIGKILL)

        write(path, then_die if written == number and not late else writer)
        if written == number:
            os.kill(os.getpid(), signal.SIGKILL)

    results.write_atomically = deadly


def break_attention() -> None:
    """The check of the model's attention finds a difference."""
    from sparsity_lab import measurement
    from sparsity_lab.checks import CheckError

    def broken(*_: Any) -> None:
        raise CheckError("layer 0: attention rebuilt differs")

    measurement.check_dense = broken


class Returns(Callback):
    """Hydra callback that appends what each job returned to `file`."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        failed = job_return.status != JobStatus.COMPLETED
        entry = [config.hydra.job.num, "failed" if failed else job_return.return_value]
        with open(self.file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
