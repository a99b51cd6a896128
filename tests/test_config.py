"""Every option file composes, is commented, and agrees with the library's own defaults."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from sparsity_lab import schemas
from sparsity_lab.cells import Candidate, Selection
from sparsity_lab.config import read_job, scorer_label
from sparsity_lab.evaluation import job as evaluation_job
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.measurement import measure

CONF = Path(__file__).resolve().parents[1] / "conf"
GIVEN = {"hf": ["model.path=some/model"], "text": ["data.path=x"], "jsonl": ["data.path=x"], "tokens": ["data.path=x"]}
NEEDS_MORE = {"recorded", "native"}  # a recording; a model with sparse attention of its own
OPTIONS = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml")) if p.stem not in NEEDS_MORE]


def composed(*overrides: str, name: str = "recall"):
    schemas.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes(group, option):
    name, read = ("evaluate", evaluation_job.read_job) if group == "evaluation" else ("recall", read_job)
    job = read(composed(f"{group}={option}", *GIVEN.get(option, []), name=name))
    assert job.cells
    assert not job.failed


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONF)))
def test_every_field_has_a_comment(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#")
    if path.parent.name == "experiment":
        return  # they set fields that are commented where they live
    fields = [
        x for x in lines if ": " in x and not x.startswith(("#", " ", "defaults", "hydra", "name:", "experiment_name"))
    ]
    assert [x for x in fields if "#" not in x] == []


def test_measure_defaults_agree_with_the_library():
    in_conf = OmegaConf.to_container(composed().measure)
    in_code = {k: p.default for k, p in inspect.signature(measure).parameters.items() if k in in_conf}
    assert in_conf == in_code


def test_lightning_defaults_agree_with_the_library():
    in_conf = OmegaConf.to_container(composed("scorer=lightning").scorer)
    in_code = dataclasses.asdict(IndexerConfig())
    assert {k: in_conf[k] for k in in_code} == in_code
    assert scorer_label(in_conf) == "lightning"


def test_a_list_makes_a_grid_and_a_value_a_cell():
    assert len(read_job(composed("selection.topk=[16,32]", "selection.compress_ratio=[1,4]")).cells) == 4
    job = read_job(composed("selection.topk=16", "selection.compress_ratio=4", "selection.window=0"))
    assert [c.selection for c in job.cells] == [Selection(compress_ratio=4, topk=16, window=0)]


def test_source_layer_null_is_single_level():
    job = read_job(composed("selection=two_level", "selection.topk=16", "selection.compress_ratio=1"))
    assert [c.selection.candidate for c in job.cells] == [None, Candidate(8, 40, 8)]
    with pytest.raises(ValueError, match=r"selection\.candidate\.block_size: needed for a two-level selection"):
        read_job(composed("selection.candidate.source_layer=8", "selection.candidate.topk_blocks=40"))
    with pytest.raises(ValueError, match=r"selection\.candidate\.source_layer: needed"):
        read_job(composed("selection.candidate.topk_blocks=40", "selection.candidate.block_size=8"))


def test_a_bad_point_of_a_grid_is_set_aside_and_a_bad_grid_is_an_error():
    job = read_job(composed("selection.topk=[0,16]", "selection.compress_ratio=1"))
    assert [c.selection.topk for c in job.cells] == [16]
    assert [f["reason"] for f in job.failed] == ["selection.topk=0: must be at least 1"]
    with pytest.raises(ValueError, match=r"selection\.topk=0: must be at least 1"):
        read_job(composed("selection.topk=0"))


def test_missing_and_unknown_keys_are_named():
    with pytest.raises(ValueError, match=r"data\.path: mandatory"):
        read_job(composed("data=text"))
    for override in ("selection.top_k=3", "scorer.index_n_heads=4", "measure.row=3", "model.path=x"):
        with pytest.raises(ConfigCompositionException, match=override.split("=")[0].split(".")[1]):
            composed(override)


def test_string_for_a_bool_is_refused_or_read():
    with pytest.raises(ValueError, match=r"selection\.exclude_window='false': must be true or false"):
        read_job(composed("selection.exclude_window='false'"))
    assert composed("measure.envelope='false'").measure.envelope is False


def test_labels_tell_scorers_apart():
    quest = OmegaConf.to_container(composed("scorer=quest", "scorer.head_reduction=logit").scorer)
    assert scorer_label(quest) == "quest[head_reduction=logit]"


def test_jobs_share_a_pass_unless_it_differs():
    def key(*overrides: str) -> str:
        return read_job(composed(*overrides)).pass_key

    base = key()
    assert key("selection.topk=3") == key("scorer=mean_key") == key("selection.window=0") == base
    different = ["data.length=64", "measure.rows=3", "measure.seed=1", "model.dtype=bfloat16", "data.seed=2", "name=x"]
    assert base not in {key(o) for o in different}
