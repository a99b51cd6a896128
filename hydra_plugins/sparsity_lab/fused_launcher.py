"""The `fused` launcher: jobs of a sweep that share a model pass are measured in one, then run as ordinary Hydra jobs.

Hydra instantiates launchers from its `hydra_plugins` namespace alone, hence this folder.
"""

# No `from __future__ import annotations`: Hydra runs this file before it is in sys.modules, where dataclass looks.
import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

log = logging.getLogger(__name__)


@dataclass
class FusedLauncherConfig:
    _target_: str = "hydra_plugins.sparsity_lab.fused_launcher.FusedLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="fused", node=FusedLauncherConfig, provider="sparsity_lab")


class FusedLauncher(Launcher):
    """Groups jobs by what their pass depends on, runs each pass once, then every job with its own result."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.task_function: TaskFunction | None = None
        self.hydra_context: HydraContext | None = None
        self.workspace: Any = None  # kept from batch to batch of a sweeper, so that a model is loaded once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # heavy imports stay out of module level: Hydra imports every plugin, also for `--help`
        from sparsity_lab import console

        assert self.config is not None
        if "evaluation" in self.config:
            from sparsity_lab.evaluation.job import EvaluationWorkspace as Workspace
            from sparsity_lab.evaluation.job import describe
        else:
            from sparsity_lab.estimate import describe
            from sparsity_lab.job import Workspace
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        configs = [self._compose(list(o), initial_job_idx + i) for i, o in enumerate(job_overrides)]
        self.workspace = workspace = self.workspace or Workspace(console.progress)
        passes = _by_pass(configs, Workspace.read)
        if passes and passes[0][0].dry_run:
            print(describe([job for jobs in passes for job in jobs]))
            return [JobReturn(status=JobStatus.COMPLETED) for _ in configs]
        log.info("%d jobs share %d passes", len(configs), len(passes))
        for jobs in passes:
            workspace.measure(jobs)
        with workspace.opened():
            return [self._run(config) for config in configs]

    def _compose(self, overrides: list[str], number: int) -> DictConfig:
        assert self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = f"{number}"
            config.hydra.job.num = number
        return config

    def _run(self, config: DictConfig) -> JobReturn:
        assert self.config is not None
        assert self.hydra_context is not None
        assert self.task_function is not None
        done = run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)  # back from the job's own log
        return done


def _by_pass(configs: Sequence[DictConfig], read: Callable[[DictConfig], Any]) -> list[list[Any]]:
    """Readable jobs grouped by their pass. The others fail by themselves when they run, each in its own log."""
    groups: dict[str, list[Any]] = {}
    for config in configs:
        task = copy.deepcopy(config)
        OmegaConf.set_readonly(task, False)
        with open_dict(task):
            del task["hydra"]
        try:
            job = read(task)
        except Exception:  # whatever it is, it comes up again where the job's own log and status tell it
            continue
        groups.setdefault(job.pass_key, []).append(job)
    return list(groups.values())
