"""A whole distillation: resuming to the last bit, early stop, the files it leaves, what it refuses."""

from __future__ import annotations

import dataclasses
import json

import cli
import pandas as pd
import pytest
import torch
from fake_model import FakeModel, documents

from sparsity_lab.cells import grid
from sparsity_lab.distill import Trainer
from sparsity_lab.distill_data import Mixture
from sparsity_lab.distill_recipe import Recipe
from sparsity_lab.distill_run import LOG_COLUMNS, Run, Schedule
from sparsity_lab.folders import notes
from sparsity_lab.lightning import IndexerConfig, Lightning, read_weights
from sparsity_lab.measurement import measure
from sparsity_lab.results import load

LENGTH = 40
CONFIG = IndexerConfig(index_n_heads=2, index_head_dim=8, rope_head_dim=4, head_dim=6)
RECIPE = Recipe(ratios=(1, 4), topk=(8, 3), steps=11, sparse_steps=3, accumulate=2, rows=16, lr=1e-2, warmup=2)
EVERY = Schedule(evaluate_every=4, checkpoint_every=3, held_out_rows=8, weights_dtype="float32")
SCRIPT = cli.ROOT / "experiments" / "distill.py"


def make(folder, *, model=None, config=CONFIG, recipe=RECIPE, schedule=EVERY, progress=lambda *_: None) -> Run:
    trainer = Trainer(model or FakeModel(num_layers=2), config, recipe, LENGTH)
    train = {"a": documents(5, LENGTH), "b": documents(3, LENGTH, seed=1)}
    return Run(
        trainer, Mixture(train, {"a": 1, "b": 2}), {"x": documents(2, LENGTH, seed=8)}, folder, schedule,
        progress=progress,
    )  # fmt: skip


class Interrupt:
    """Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, total: int) -> None:
        if done == self.after:
            raise KeyboardInterrupt


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {f"{k}{n}": t for k, m in run.trainer.modules.items() for n, t in m.state_dict().items()}


@pytest.mark.parametrize("stops", [[1], [5], [3, 8], [10, 11]])
@pytest.mark.parametrize("patience", [None, 99])
def test_an_interrupted_run_ends_with_the_same_weights_and_log(tmp_path, stops, patience):
    schedule = dataclasses.replace(EVERY, patience=patience)
    whole = make(tmp_path / "whole", schedule=schedule)
    score = whole.run()
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "parts", schedule=schedule, progress=Interrupt(stop)).run()
        assert cli.status(tmp_path / "parts") == "interrupted"
        assert not list((tmp_path / "parts").glob("*.safetensors"))
    parts = make(tmp_path / "parts", schedule=schedule)
    assert parts.run() == score
    assert parts.at.step == 11
    one, other = weights_of(whole), weights_of(parts)
    assert all(torch.equal(one[key], other[key]) for key in one)
    logs = [pd.read_csv(tmp_path / name / "training.csv").drop(columns="seconds") for name in ("whole", "parts")]
    pd.testing.assert_frame_equal(*logs, check_exact=True)
    assert not (tmp_path / "parts" / "checkpoint.pt").exists()


def test_what_a_run_leaves(tmp_path):
    run = make(tmp_path)
    score = run.run()
    assert cli.status(tmp_path) == "complete"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ratio1.safetensors", "ratio4.safetensors", "training.csv", "manifest.json", "status"}
    table = pd.read_csv(tmp_path / "training.csv")
    assert tuple(table) == LOG_COLUMNS
    assert sorted(table["step"].unique()) == [0, 4, 8, 11]
    assert table.groupby("step").size().eq(2 * 2).all()
    assert table["loss"].isna().eq(table["step"] == 0).all()
    assert table.loc[table["step"] == 8, "tokens"].eq(8 * 2 * LENGTH).all()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["parameters"]["1"] == sum(p.numel() for p in run.trainer.modules[0, 1].parameters())
    assert manifest["training"]["tokens"] == 11 * 2 * LENGTH
    assert score == pytest.approx(sum(row["relative_coverage"] for row in manifest["held_out"]) / 4)


def test_the_description_in_a_weight_file(tmp_path):
    run = make(tmp_path)
    run.run()
    files = read_weights(tmp_path, run.trainer.model)
    assert sorted(files) == [1, 4]
    about = files[4].about
    assert about["compress_ratio"] == 4
    assert about["layers"] == [0, 1]
    assert about["topology"]["compress_ratios"] == [4, 4]
    assert about["recipe"] == json.loads(json.dumps(RECIPE.describe()))
    assert about["data"]["train"]["b"] == {**documents(1, LENGTH, seed=1).source, "num_documents": 3, "weight": 2}
    assert about["data"]["length"] == LENGTH
    assert about["git"] == {} or about["git"].keys() == {"sha", "dirty"}
    assert {"torch", "sparsity_lab"} <= about["versions"].keys()
    assert (about["steps"], about["tokens"]) == (11, 11 * 2 * LENGTH)
    assert about["held_out"]["x"].keys() == {"0", "1"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_files_give_the_held_out_figures_they_state(tmp_path, dtype):
    run = make(tmp_path, schedule=dataclasses.replace(EVERY, weights_dtype=dtype))
    run.run()
    model = FakeModel(num_layers=2)
    scorer = Lightning(model, weights=tmp_path)
    assert scorer.files[1].tensors["layers.0.indexer.wq_b.weight"].dtype == getattr(torch, dtype)
    for ratio, k in ((1, 8), (4, 3)):
        cells = grid("lightning", compress_ratio=ratio, topk=k)
        options = {"scorers": {"lightning": scorer}, "rows": 8, "detail_rows": 0, "envelope": False}
        frame = measure(model, documents(2, LENGTH, seed=8), cells, **options).frame(resamples=1)
        stated = scorer.files[ratio].about["held_out"]["x"]
        for layer, found in zip(frame["layer"], frame["relative_coverage"], strict=True):
            assert found == pytest.approx(stated[str(layer)]["relative_coverage"], abs=1e-6)


def test_a_finished_run_does_nothing_again(tmp_path, caplog):
    score = make(tmp_path).run()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = FakeModel(num_layers=2)
    with caplog.at_level("INFO"):
        assert make(tmp_path, model=model).run() == pytest.approx(score)
    assert "complete already; nothing to do" in caplog.text
    assert model.observed == []
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_quantised_training_states_how_far_selections_agree(tmp_path):
    config = dataclasses.replace(CONFIG, index_head_dim=32, rope_head_dim=16, quant="fp4_ue8m0")
    run = make(tmp_path, config=config)
    run.run()
    stated = read_weights(tmp_path, run.trainer.model)[1].about["held_out"]["x"]["1"]
    assert 0 < stated["quant_agreement"] <= 1


def test_an_early_stop_keeps_the_best_weights(tmp_path):
    recipe = dataclasses.replace(RECIPE, steps=40, lr=5.0, schedule="constant", warmup=0, sparse_steps=0)
    run = make(tmp_path, recipe=recipe, schedule=dataclasses.replace(EVERY, evaluate_every=1, patience=2))
    score = run.run()
    by_step = pd.read_csv(tmp_path / "training.csv").groupby("step")["relative_coverage"].mean()
    best = int(by_step.idxmax())
    assert by_step.index.max() == best + 2 < 40
    assert score == pytest.approx(by_step.max(), abs=1e-5)


def test_other_settings_are_not_mixed_in(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, progress=Interrupt(7)).run()
    with pytest.raises(ValueError, match=r"holds a run with recipe\.lr=0\.01, not 0\.5; give this run another name"):
        make(tmp_path, recipe=dataclasses.replace(RECIPE, lr=0.5)).run()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"holds a run with indexer\.relu=True, not False"):
        make(tmp_path, config=dataclasses.replace(CONFIG, relu=False)).run()


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, progress=Interrupt(7)).run()
    (tmp_path / "checkpoint.pt").write_bytes((tmp_path / "checkpoint.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint\.pt: damaged, or not a checkpoint of this version; remove it"):
        make(tmp_path).run()
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json: not the manifest of a distillation"):
        make(tmp_path).run()


def test_a_failure_is_noted(tmp_path):
    class Broken(FakeModel):
        def observe(self, tokens, observer, layers):
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError):
        make(tmp_path, model=Broken(num_layers=2)).run()
    assert cli.status(tmp_path) == "failed: no luck"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_every": 0}, r"schedule\.evaluate_every=0: must be at least 1"),
        ({"patience": 0}, r"schedule\.patience=0: must be at least 1"),
        ({"weights_dtype": "int8"}, r"schedule\.weights_dtype='int8': must be one of float32, bfloat16"),
    ],
)
def test_schedules_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**changes)


SOURCES = [
    f"data.{part}=[{{name:pydoc,num_documents:{count},skip:{skip}}}]"
    for part, count, skip in (("train", 3, 2), ("held_out", 2, 0))
]


def test_the_command_trains_and_recall_takes_what_it_leaves(tmp_path):
    import tiny_models

    model = ["model=hf", f"model.path={tiny_models.make('llama', tmp_path / 'llama')}"]
    small = ["data.length=64", "indexer.index_head_dim=8", "indexer.rope_head_dim=4", "recipe.rows=16"]
    small += ["recipe.ratios=[1,4]", "recipe.topk=[8,3]", "recipe.steps=4", "schedule.held_out_rows=8"]
    command = [*model, *SOURCES, *small, f"results_dir={tmp_path}/results"]
    done = cli.run(tmp_path, *command, script=SCRIPT)
    assert done.code == 0, done.err
    folder = tmp_path / "results" / "distill" / "llama"
    assert cli.status(folder) == "complete"
    assert "step 4 of 4: loss" in (folder / "distill.log").read_text()
    again = cli.run(tmp_path, *command, script=SCRIPT)
    assert again.code == 0
    assert again.forwards == 0
    recall = [*model, "data.length=80", "data.num_documents=2", "measure.rows=16", "measure.detail_rows=0"]
    recall += ["scorer=lightning", f"scorer.weights={folder}", "selection.topk=8", "selection.compress_ratio=[1,4]"]
    measured = cli.run(tmp_path, *recall, f"results_dir={tmp_path}/results")
    assert measured.code == 0, measured.err
    results = tmp_path / "results" / "recall" / "llama-pydoc-80"
    assert len(load(results).cells) == 8
    (note,) = notes(results)
    told = f"scorer.weights={folder}: distilled on documents of 64 tokens, used on 80"
    assert told in note
    assert (results / "jobs" / "single" / "recall.log").read_text().count(told) == 1
    wrong = cli.run(tmp_path, *command, "recipe.lr=1", script=SCRIPT)
    assert wrong.code == 1
    assert "holds a run with recipe.lr=0.003, not 1.0" in wrong.err


EXPERIMENTS = sorted((cli.ROOT / "conf" / "experiment" / "distill").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_composes(path, monkeypatch):
    from hydra import compose, initialize_config_dir

    from sparsity_lab import config, schemas

    monkeypatch.setenv("TOKENS", "tokens")
    schemas.register()
    with initialize_config_dir(str(cli.ROOT / "conf"), version_base="1.3"):
        composed = compose("distill", [f"experiment=distill/{path.stem}"], return_hydra_config=True)
        swept = composed.hydra.sweeper.params or {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("omegaconf.OmegaConf.missing_keys", lambda *_: set())  # hydra's own, filled when it runs
            settings = config.resolve(compose("distill", [f"experiment=distill/{path.stem}"]))
    assert Recipe(**settings["recipe"]).steps
    assert IndexerConfig(**settings["indexer"])
    assert Schedule(**settings["schedule"])
    assert (composed.hydra.mode is not None) == bool(swept or path.stem == "ablation")
    assert f"experiment=distill/{path.stem}" in path.read_text() or path.stem == "ablation"


def test_an_ablation_gives_a_run_a_value_and_a_figure(tmp_path):
    import subprocess
    import sys

    import tiny_models

    model = ["model=hf", f"model.path={tiny_models.make('llama', tmp_path / 'llama')}"]
    small = ["data.length=64", "recipe.rows=16", "recipe.steps=2", "recipe.index_source_layers=[0,1]"]
    command = ["experiment=distill/heads", *model, *SOURCES, *small, f"results_dir={tmp_path}/results"]
    done = cli.run(tmp_path, *command, script=SCRIPT)
    assert done.code == 0, done.err
    folder = tmp_path / "results" / "distill_heads"
    names = {path.parent.name for path in folder.glob("*/status")}
    assert names == {f"heads-{heads}" for heads in (1, 2, 4, 8, 16)}
    plot = [sys.executable, str(cli.ROOT / "analysis" / "plot_training.py"), str(folder)]
    drawn = subprocess.run(plot, capture_output=True, text=True, check=True).stdout.split()
    assert [path.rpartition("/")[2] for path in drawn] == [f"training.{kind}" for kind in ("png", "svg", "pdf", "csv")]
    assert sorted(pd.read_csv(drawn[3])["indexer.index_n_heads"].unique()) == [1, 2, 4, 8, 16]
