"""Pretraining at tiny size: it learns, resumes to the last bit, balances its experts, and leaves a model behind."""

from __future__ import annotations

import dataclasses
import json

import cli
import numpy as np
import pandas as pd
import pytest
import tiny_pretrain
import torch
from tiny_pretrain import LENGTH
from v41_cases import tiny_config

from sparsity_lab import pretrain_optim
from sparsity_lab.models.deepseek_v41 import load
from sparsity_lab.pretrain import Pretrainer
from sparsity_lab.pretrain_model import flops_per_token, model_config
from sparsity_lab.pretrain_optim import kind_of, orthogonalised
from sparsity_lab.pretrain_prepare import TextSettings, prepare
from sparsity_lab.pretrain_recipe import PretrainRecipe

SCRIPT = cli.ROOT / "experiments" / "pretrain.py"
SHORT = {"steps": 2}


class Interrupt:
    """Ctrl-C after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, done: int, total: int) -> None:
        if done >= self.after:
            raise KeyboardInterrupt


def test_the_loss_falls():
    train = tiny_pretrain.trainer(steps=24, dense=1.0, sparse=0.0, embed_lr=3e-2, lr=1e-2)
    data = tiny_pretrain.batches(train.recipe)
    losses = [float(train.step(data, step, 24)["language"]) for step in range(24)]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), losses


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
def test_an_interrupted_run_has_the_same_curve_and_weights(tmp_path, optimiser):
    whole = tiny_pretrain.run(tmp_path / "whole", optimiser=optimiser)
    score = whole.run()
    for stop in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            tiny_pretrain.run(tmp_path / "parts", Interrupt(stop), optimiser=optimiser).run()
        assert cli.status(tmp_path / "parts") == "interrupted"
    parts = tiny_pretrain.run(tmp_path / "parts", optimiser=optimiser)
    assert parts.run() == score
    curves = [(tmp_path / name / "losses.csv").read_bytes() for name in ("whole", "parts")]
    assert curves[0] == curves[1]
    for name, tensor in whole.trainer.model.state_dict().items():
        assert torch.equal(tensor, parts.trainer.model.state_dict()[name]), name
    assert whole.run() == score, "a finished run is found"
    logs = [pd.read_csv(tmp_path / name / "training.csv") for name in ("whole", "parts")]
    assert list(logs[0]["stage"]) == ["dense", "sparse", "pool"]
    for column in ("step", "loss", "index_loss", "loss_dense", "bits_dense", "coverage_0"):
        pd.testing.assert_series_equal(logs[0][column], logs[1][column], check_exact=True)
    assert not (tmp_path / "whole" / "checkpoint.pt").exists()


def test_the_model_left_behind_loads_and_is_the_one_trained(tmp_path):
    run = tiny_pretrain.run(tmp_path / "run")
    run.run()
    model = load(path=str(tmp_path / "run" / "model"), dtype="float32")
    for name, p in run.trainer.model.named_parameters():
        kept = model.model.get_parameter(name).cpu()
        want = p if name.endswith(("_fn", "_base", "_scale", "sink", ".bias", "bias_vl")) else p.bfloat16().float()
        assert torch.equal(kept, want), name
    record = json.loads((tmp_path / "run" / "model" / "record.json").read_text())
    assert record["training"]["steps"] == 6
    assert record["held_out"]["bits_pool"] > 0


def test_other_settings_and_hopeless_losses_are_refused(tmp_path):
    tiny_pretrain.run(tmp_path / "run", **SHORT).run()
    with pytest.raises(ValueError, match=r"recipe\.lr=0\.003, not 0\.01"):
        tiny_pretrain.run(tmp_path / "run", lr=1e-2, **SHORT).run()
    broken = tiny_pretrain.run(tmp_path / "broken", **SHORT)
    with torch.no_grad():
        broken.trainer.model.model.embed.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"the loss is nan.* lower recipe\.lr"):
        broken.run()
    assert cli.status(tmp_path / "broken").startswith("failed: step 0: the loss is nan")


def test_a_preflight_and_a_time_budget(tmp_path):
    settings = {"steps": None, "seconds": 600.0}
    run = tiny_pretrain.run(tmp_path / "run", **settings)
    weights = {name: tensor.clone() for name, tensor in run.trainer.model.state_dict().items()}
    assert run._plan(preflight=True) > 1
    assert np.isnan(run.run(preflight=True))
    assert not list((tmp_path / "run").iterdir()), "so other settings may follow"
    for name, tensor in run.trainer.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), "measuring the speed leaves no trace"
    late = tiny_pretrain.run(tmp_path / "late", **settings)
    late._plan = lambda: 10_000
    late.began -= 600
    assert np.isnan(late.run())
    assert cli.status(tmp_path / "late") == "interrupted"
    assert (tmp_path / "late" / "checkpoint.pt").exists()
    assert (tmp_path / "late" / "model" / "config.json").exists()


def test_the_bias_evens_the_load():
    """One expert is everybody's favourite at first."""
    train = tiny_pretrain.trainer(balance=0.05, steps=20, lr=1e-6, embed_lr=0.0, mixing_lr=0.0, index_lr=0.0)
    with torch.no_grad():
        for bias in train.biases:
            bias[0] = 0.5
    data = tiny_pretrain.batches(train.recipe)
    found = [float(train.step(data, step, 20)["imbalance"]) for step in range(20)]
    assert found[0] > 3
    assert np.mean(found[-5:]) < 0.7 * found[0]
    assert all(float(bias[0]) < 0.5 for bias in train.biases)


def test_an_even_load_moves_nothing():
    train = tiny_pretrain.trainer()
    train.loads.fill_(4)
    before = [bias.clone() for bias in train.biases]
    train._balance()
    assert all(torch.equal(*pair) for pair in zip(before, train.biases, strict=True))


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 12, 5), (1, 4, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    found = orthogonalised(torch.randn(shape) * 30)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.4


def test_muon_is_what_its_formula_says():
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 4))
    start, momentum = p.detach().clone(), torch.zeros(6, 4)
    muon = pretrain_optim.Muon([p], lr=0.1, momentum=0.9, weight_decay=0.2)
    want = start
    for _ in range(3):
        p.grad = torch.randn(6, 4)
        momentum = 0.9 * momentum + 0.1 * p.grad
        ahead = 0.1 * p.grad + 0.9 * momentum
        want = want * (1 - 0.1 * 0.2) - 0.1 * 0.2 * 6**0.5 * orthogonalised(ahead[None])[0]
        muon.step()
    torch.testing.assert_close(p.detach(), want)


def test_every_parameter_has_its_kind():
    model = tiny_pretrain.trainer().model
    kinds = {name: kind_of(name, p) for name, p in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == "embed"} == {"model.embed.weight"}
    assert kinds["lm_head.weight"] == kinds["model.norm.weight"] == kinds["model.layers.0.attn.attn_sink"] == "rest"
    assert kinds["model.layers.1.ffn.gate.weight"] == kinds["model.layers.1.hc_ffn_fn"] == "mixing"
    assert kinds["model.layers.1.attn.indexer.wk.weight"] == "indexer"
    assert kinds["model.layers.1.ffn.experts.w13"] == kinds["model.layers.0.attn.compressor.wgate.weight"] == "matrices"


def test_stages_and_rates():
    recipe = PretrainRecipe(steps=100, warmup=10, decay=0.5, dense=0.6, sparse=0.3)
    stages = [recipe.stage(step, 100) for step in (0, 59, 60, 89, 90, 99)]
    assert stages == ["dense", "dense", "sparse", "sparse", "pool", "pool"]
    rates = [recipe.rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert set(rates[10:51]) == {1.0}
    assert rates[-1] == pytest.approx(1 / 50)
    assert len({recipe.phase(step) for step in range(16)}) == 16


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"steps": None}, "give one of them"),
        ({"seconds": 3}, "give one of them"),
        ({"lr": 0}, r"recipe\.lr=0: must be above 0"),
        ({"dense": 0.9, "sparse": 0.2}, "must add up to at most 1"),
        ({"decay": 1.5}, r"recipe\.decay=1\.5"),
        ({"tile": 20}, "a multiple of"),
        ({"optimiser": "sgd"}, r"recipe\.optimiser='sgd'"),
    ],
)
def test_recipes_that_cannot_be_are_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        PretrainRecipe(**{"steps": 10} | changes)


def test_models_that_cannot_be_trained_are_refused():
    with pytest.raises(ValueError, match=r"recipe\.length=65: .* at most 64"):
        tiny_pretrain.trainer(length=65)
    settings = {"size": "tiny", "path": None, "window_quant": None, "kv_quant": "none", "index_quant": None}
    config = model_config(settings, {"hidden_size": 32})
    assert (config.hidden_size, config.kv_quant, config.index_quant) == (32, "none", "fp4_ue8m0")
    with pytest.raises(ValueError, match=r"shape\.width: no field"):
        model_config(settings, {"width": 3})
    with pytest.raises(ValueError, match=r"model\.path=x: has no readable config\.json"):
        model_config({**settings, "path": "x"}, {})


def test_indexers_alone_learn_on_from_a_checkpoint(tmp_path):
    """New ones of another shape, too; nothing else moves, router biases included."""
    tiny_pretrain.run(tmp_path / "first").run()
    start = tmp_path / "first" / "model"
    config = dataclasses.replace(tiny_config(**tiny_pretrain.SHAPE), index_n_heads=3)
    recipe = PretrainRecipe(
        **tiny_pretrain.RECIPE | {"steps": 30, "train": "indexers", "dense": 1.0, "sparse": 0.0, "index_lr": 1e-2}
    )
    train = Pretrainer(config, recipe, torch.device("cpu"), start=start)
    before = {name: p.detach().clone() for name, p in train.model.named_parameters()}
    data = tiny_pretrain.batches(recipe)
    index = [float(train.step(data, step, 30)["index"].mean()) for step in range(30)]
    assert np.mean(index[-5:]) < 0.9 * np.mean(index[:5]), index
    kept = dict(load(path=str(start), dtype="float32").model.named_parameters())
    for name, p in train.model.named_parameters():
        if pretrain_optim.is_indexer(name):
            assert not torch.equal(p, before[name]), name
            assert "wq_b" not in name or p.shape[0] == 3 * config.index_head_dim
        else:
            assert torch.equal(p, kept[name].cpu()), name


def test_what_a_checkpoint_cannot_start(tmp_path):
    tiny_pretrain.run(tmp_path / "first").run()
    config = tiny_config(**tiny_pretrain.SHAPE | {"moe_intermediate_size": 64})
    with pytest.raises(ValueError, match=r"shape: .*experts.* would be .*, in .* it is "):
        Pretrainer(
            config, PretrainRecipe(steps=1, length=LENGTH), torch.device("cpu"), start=tmp_path / "first" / "model"
        )
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json, which training needs"):
        prepare(tmp_path / "data", TextSettings(), vocab_size=384, length=64, start=tmp_path / "first" / "model")
    with pytest.raises(ValueError, match=r"recipe\.train=indexers: needs a trained model in model\.path"):
        tiny_pretrain.trainer(train="indexers")
    with pytest.raises(ValueError, match=r"recipe\.train='router': must be one of all, indexers"):
        PretrainRecipe(steps=1, train="router")


def test_a_run_that_starts_elsewhere_is_another_run(tmp_path):
    """And its record tells of the training before it."""
    tiny_pretrain.run(tmp_path / "first").run()
    start = tmp_path / "first" / "model"
    tiny_pretrain.run(tmp_path / "second", start=start, **SHORT).run()
    record = json.loads((tmp_path / "second" / "model" / "record.json").read_text())
    assert record["start"]["training"]["steps"] == 6
    assert record["training"]["steps"] == 2
    with pytest.raises(ValueError, match="holds a run with start="):
        tiny_pretrain.run(tmp_path / "second", **SHORT).run()
    (start / "record.json").write_text("{")
    with pytest.raises(ValueError, match=r"record\.json: damaged"):  # before the training, not after
        tiny_pretrain.run(tmp_path / "third", start=start, **SHORT)


def test_work_done_counts_what_a_token_uses():
    config = tiny_config(**tiny_pretrain.SHAPE)
    more = dataclasses.replace(config, n_routed_experts=16)
    router = config.num_hidden_layers * 8 * config.hidden_size
    assert flops_per_token(more, LENGTH) - flops_per_token(config, LENGTH) == pytest.approx(6 * router)
    longer = flops_per_token(config, 2 * LENGTH) - flops_per_token(config, LENGTH)
    keys = LENGTH / 2 * (1 / 2 + 1 + 1)
    assert longer == pytest.approx(12 * config.num_attention_heads * config.head_dim * keys)


def test_bfloat16_forwards_keep_float32_weights():
    train = Pretrainer(
        tiny_config(**tiny_pretrain.SHAPE), PretrainRecipe(**tiny_pretrain.RECIPE | {"dtype": "bfloat16"}),
        torch.device("cpu"),
    )  # fmt: skip
    found = train.step(tiny_pretrain.batches(train.recipe), 5, 6)
    assert all(bool(torch.isfinite(value).all()) for value in found.values())
    assert {p.dtype for p in train.model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_the_command_from_text_to_a_model_that_measures(tmp_path):
    small = [
        "experiment=pretrain/smoke", f"results_dir={tmp_path}", "recipe.steps=3", "recipe.length=64",
        "+shape.hidden_size=32", "shape.vocab_size=384", "data.max_package_bytes=300000", "data.held_out_percent=20",
        "schedule.evaluate_every=3", "recipe.tile=32",
    ]  # fmt: skip
    done = cli.run(tmp_path, *small, script=SCRIPT)
    assert done.code == 0, done.err
    assert cli.status(tmp_path / "pretrain" / "smoke") == "complete"
    model = ["model=deepseek_v41", f"model.path={tmp_path}/pretrain/smoke/model", "scorer=native"]
    done = cli.run(
        tmp_path, *model, "data.length=96", "data.num_documents=1", "measure.rows=16", "measure.detail_rows=0",
        "selection.topk=8", "selection.compress_ratio=1", "selection.window=16", f"results_dir={tmp_path}/measured",
    )  # fmt: skip
    assert done.code == 0, done.err
    done = cli.run(tmp_path, *small, "recipe.lr=-1", script=SCRIPT)
    assert "recipe.lr=-1" in done.last


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", [0, 2, 5])
def test_a_gpu_makes_the_same_step(stage):
    """All stages, in float32, with the fused kernel. Index scores tied at 0 may be selected otherwise there."""
    found = {}
    for device in ("cpu", "cuda"):
        recipe = PretrainRecipe(**tiny_pretrain.RECIPE)
        train = Pretrainer(tiny_config(**tiny_pretrain.SHAPE), recipe, torch.device(device))
        assert not train.notes
        found[device] = train.step(tiny_pretrain.batches(recipe), stage, recipe.steps or 0)
    for name in ("language", "norm", "imbalance"):
        torch.testing.assert_close(found["cuda"][name].cpu(), found["cpu"][name], rtol=2e-2, atol=1e-3)
    assert bool(torch.isfinite(found["cuda"]["index"]).all())
