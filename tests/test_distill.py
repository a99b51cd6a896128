"""The trainer: loss and targets against loops, gradients through the real observer, what training reaches."""

from __future__ import annotations

import dataclasses
import math

import pytest
import tiny_models
import torch
from fake_model import FakeModel, documents, plain_attention

from sparsity_lab.cells import grid
from sparsity_lab.dense import attention_probabilities
from sparsity_lab.distill import Trainer, kl_to_dense, top_allowed
from sparsity_lab.distill_recipe import Recipe
from sparsity_lab.lightning import IndexerConfig
from sparsity_lab.measurement import measure, sample_rows
from sparsity_lab.models.hf import HFModel

LENGTH = 48
SMALL = IndexerConfig(index_n_heads=4, index_head_dim=8, rope_head_dim=4, head_dim=12, q_lora_rank=10)
CONFIGS = {
    "v4.1": SMALL,
    "full rank, no relu": dataclasses.replace(SMALL, q_lora_rank=None, relu=False),
    "v3.2": dataclasses.replace(SMALL, rope_layout="half", rope_place="first", hadamard=True, key_norm="layer"),
    "fp4": dataclasses.replace(SMALL, index_head_dim=32, rope_head_dim=16, quant="fp4_ue8m0"),
}
SHORT = Recipe(ratios=(1, 4), topk=(8, 3), steps=20, rows=16, warmup=2)


def trainer_of(model=None, config=SMALL, length=LENGTH, **changes) -> Trainer:
    return Trainer(model or FakeModel(num_layers=3), config, dataclasses.replace(SHORT, **changes), length)


def naive_kl(scores: torch.Tensor, mass: torch.Tensor, allowed: torch.Tensor) -> float:
    """Row by row, position by position, in Python floats."""
    rows = []
    for row in range(len(scores)):
        places = [j for j in range(scores.shape[1]) if allowed[row, j]]
        total = sum(float(mass[row, j]) for j in places)
        partition = sum(math.exp(float(scores[row, j])) for j in places)
        loss = 0.0
        for j in places:
            target, guess = float(mass[row, j]) / total, math.exp(float(scores[row, j])) / partition
            loss += target * math.log(target / guess) if target else 0.0
        rows.append(loss)
    return sum(rows) / len(rows)


def random_case(rows: int = 6, n: int = 9, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scores, mass = torch.randn(rows, n, generator=generator), torch.rand(rows, n, generator=generator)
    mass[mass < 0.2] = 0.0
    allowed = torch.arange(n) <= torch.arange(rows).unsqueeze(-1) + 1
    return scores, mass, allowed


@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_divergence(seed):
    scores, mass, allowed = random_case(seed=seed)
    mass[:, 0] += 0.1
    assert float(kl_to_dense(scores, mass, allowed)) == pytest.approx(naive_kl(scores, mass, allowed), rel=1e-5)


def test_the_loss_is_zero_where_the_scores_say_it_all_and_hidden_positions_have_no_gradient():
    scores, mass, allowed = random_case()
    mass = mass + 0.01
    assert abs(float(kl_to_dense(mass.log(), mass, allowed))) < 1e-6
    scores.requires_grad_(True)
    kl_to_dense(scores, mass, allowed).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert (scores.grad[~allowed] == 0).all()
    assert (scores.grad[allowed] != 0).any()


def test_a_row_without_any_mass_is_no_division_by_zero():
    scores, mass, allowed = random_case()
    mass[0] = 0.0
    assert torch.isfinite(kl_to_dense(scores, mass, allowed))


def test_top_allowed_takes_the_best_and_of_equals_the_first():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 9.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    allowed = torch.tensor([[True, True, True, True, False], [True, False, False, False, False]])
    assert top_allowed(scores, allowed, 2).tolist() == [[False, True, True, False, False], [True] + [False] * 4]


def dense_mass(model: FakeModel, tokens: torch.Tensor, layer: int, rows: torch.Tensor) -> torch.Tensor:
    return attention_probabilities(model.activations(tokens.unsqueeze(0), layer), rows).mean(0)


def expected_loss(trainer: Trainer, document, masses, layer: int, ratio: int, rows: torch.Tensor, topk=None) -> float:
    """Loss of one indexer from its own scores and the mean of the masses, summed over groups by a loop."""
    x = trainer.model.activations(document.tokens.unsqueeze(0), layer).x
    with torch.no_grad():
        module = trainer.modules[layer, ratio]
        scores = module.scores(x[:, rows], module.keys(x, trainer.freqs), trainer.freqs[rows])[0]
    mass, n = sum(masses) / len(masses), LENGTH // ratio
    groups = torch.stack([mass[:, j * ratio : (j + 1) * ratio].sum(-1) for j in range(n)], dim=-1)
    recipe = trainer.recipe
    allowed = torch.zeros(len(rows), n, dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        for j in range(n):
            in_window = j * ratio > row - recipe.window
            allowed[i, j] = (j + 1) * ratio <= row + 1 and not (recipe.exclude_window and in_window)
        if topk is not None:
            places = sorted((j for j in range(n) if allowed[i, j]), key=lambda j: (-float(scores[i, j]), j))
            allowed[i] = torch.tensor([j in places[:topk] for j in range(n)])
    return naive_kl(scores, groups, allowed)


@pytest.mark.parametrize("changes", [{}, {"exclude_window": True, "window": 9}], ids=["all visible", "window left out"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_reports_the_loss_of_its_rows(changes, sparse):
    trainer, document = trainer_of(**changes, sparse_steps=20 if sparse else 0), documents(1, LENGTH)[0]
    rows = trainer.rows(document.id, 0)
    assert (rows + 1 >= 4).all()
    if changes:
        assert (rows >= 9).all()
    wanted = [
        [
            expected_loss(
                trainer, document, [dense_mass(trainer.model, document.tokens, layer, rows)], layer, ratio, rows,
                k if sparse else None,
            )
            for ratio, k in ((1, 8), (4, 3))
        ]
        for layer in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(trainer.step([document], 0), torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_the_served_target_is_the_mean_over_the_layers_that_use_the_selection():
    model = FakeModel(num_layers=6)
    trainer, document = trainer_of(model, target="served", index_source_layers=(1, 4)), documents(1, LENGTH)[0]
    rows = trainer.rows(document.id, 0)
    mass = {layer: dense_mass(model, document.tokens, layer, rows) for layer in range(6)}
    served = {1: [1, 2, 3], 4: [4, 5]}
    wanted = [
        [expected_loss(trainer, document, [mass[i] for i in layers], source, ratio, rows) for ratio in (1, 4)]
        for source, layers in served.items()
    ]
    found = trainer.step([document], 0)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-6)
    assert model.observed[-1] == [1, 2, 3, 4, 5]
    own = trainer_of(model, index_source_layers=(1, 4)).step([document], 0)
    assert not torch.allclose(own, found, rtol=1e-3)


def hf_model() -> HFModel:
    return HFModel(tiny_models.build("llama"), None, name="llama", fingerprint="f" * 16)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_every_parameter_of_a_real_model_in_inference_mode(name, autocast):
    model = hf_model()
    before = [p.clone() for p in model.model.parameters()]
    trainer = trainer_of(model, CONFIGS[name], autocast=autocast)
    start = {
        (key, n): p.detach().clone() for key, module in trainer.modules.items() for n, p in module.named_parameters()
    }
    (document,) = documents(1, LENGTH)
    assert trainer.step([document], 0).isfinite().all()
    for key, module in trainer.modules.items():
        for n, parameter in module.named_parameters():
            assert parameter.grad is not None, (key, n)
            assert parameter.grad.isfinite().all(), (key, n)
            assert float(parameter.grad.abs().max()) > 0, (key, n)
            assert not torch.equal(parameter, start[key, n]), (key, n)
    assert all(p.grad is None for p in model.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.model.parameters(), strict=True))


def test_accumulation_averages_the_documents():
    docs = documents(2, LENGTH)
    together = trainer_of(accumulate=2)
    loss = together.step(docs, 0)
    alone = [trainer_of(accumulate=1) for _ in docs]
    losses = [trainer.step([document], 0) for trainer, document in zip(alone, docs, strict=True)]
    torch.testing.assert_close(loss, torch.stack(losses).mean(0))
    for key, module in together.modules.items():
        for n, parameter in module.named_parameters():
            parts = [dict(trainer.modules[key].named_parameters())[n].grad for trainer in alone]
            torch.testing.assert_close(parameter.grad, (parts[0] + parts[1]) / 2, rtol=1e-4, atol=1e-7)


def test_no_layer_beyond_the_last_source_is_run():
    model = hf_model()
    ran = []
    model.model.model.layers[2].register_forward_pre_hook(lambda *_: ran.append(2))
    trainer_of(model, index_source_layers=(0, 1)).step([documents(1, LENGTH)[0]], 0)
    assert not ran
    trainer_of(model, index_source_layers=(0, 1), target="served").step([documents(1, LENGTH)[0]], 0)
    assert ran == [2]


class Classes(FakeModel):
    """Every query attends to the even tokens of its own class; odd ones repel it, so they cancel in a mean key."""

    def activations(self, tokens, layer):
        acts, classes = super().activations(tokens, layer), tokens[0] % 4
        odd = torch.arange(len(classes)) % 2
        x = torch.nn.functional.one_hot(classes + 4 * odd, self.hidden_size).float()
        q = 4 * torch.nn.functional.one_hot(classes, self.head_dim).float()
        k = q * (1 - 2 * odd).unsqueeze(-1)
        scale = self.head_dim**-0.5
        output = plain_attention(q[None], k[None], acts.v[0], scale, None, None, None).float()
        return dataclasses.replace(acts, x=x[None], q=q[None, None], k=k[None, None], output=output, scale=scale)


def test_training_beats_mean_key_and_the_loss_falls():
    model, train, held_out = Classes(1, 1, 1), documents(12, 96), documents(4, 96, seed=5)
    trainer = trainer_of(model, length=96, ratios=(4,), topk=(6,), steps=60, rows=32, lr=1e-2)
    losses = [float(trainer.step([train[step % 12]], step).mean()) for step in range(60)]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    found = trainer.evaluate(held_out, rows=32)["relative_coverage"].mean()
    cells = grid("mean_key", compress_ratio=4, topk=6)
    baseline = measure(model, held_out, cells, rows=32, detail_rows=0, envelope=False)
    assert found > baseline.frame(resamples=1)["relative_coverage"].mean() + 0.03


def test_rows_change_with_the_step_and_the_seed_alone():
    trainer = trainer_of()
    assert torch.equal(trainer.rows("a", 3), trainer_of().rows("a", 3))
    assert not torch.equal(trainer.rows("a", 3), trainer.rows("a", 4))
    assert not torch.equal(trainer.rows("a", 3), trainer_of(seed=1).rows("a", 3))
    assert trainer_of(rows=None).rows("a", 0).tolist() == list(range(3, LENGTH))


def test_agreement_counts_what_quantisation_leaves_of_a_selection():
    trainer, held_out = trainer_of(config=CONFIGS["fp4"]), documents(2, LENGTH, seed=3)
    found = trainer.agreement(held_out, rows=10).set_index(["layer", "compress_ratio"])["quant_agreement"]
    for layer, ratio, k in ((0, 1, 8), (2, 4, 3)):
        shares = []
        for document in held_out:
            rows = sample_rows(LENGTH, 10, 0, document.id)
            x = trainer.model.activations(document.tokens.unsqueeze(0), layer).x
            sets = []
            for quant in ("fp4_ue8m0", "none"):
                module = trainer.modules[layer, ratio]
                module.indexer.quant = quant
                with torch.no_grad():
                    scores = module.scores(x[:, rows], module.keys(x, trainer.freqs), trainer.freqs[rows])[0]
                module.indexer.quant = "fp4_ue8m0"
                visible = [(row + 1) // ratio for row in rows.tolist()]
                order = [sorted(range(v), key=lambda j, r=r: (-float(r[j]), j)) for v, r in zip(visible, scores)]  # noqa: B905
                sets.append([set(o[:k]) for o in order])
            pairs = [len(a & b) / k for a, b, v in zip(*sets, visible, strict=True) if v > k]
            shares.append(sum(pairs) / len(pairs))
        assert float(found[layer, ratio]) == pytest.approx(sum(shares) / 2)
    assert 0.2 < found.mean() < 1
    plain = trainer_of(config=SMALL).agreement(held_out, rows=10)
    assert plain["quant_agreement"].eq(1).all()


def test_learning_rate_rises_then_falls():
    recipe = Recipe(steps=100, warmup=10, lr=1.0)
    rates = [recipe.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(rates[9], rel=0.03)
    assert rates[50] == pytest.approx(0.5)
    assert rates[-1] < 0.001
    constant = Recipe(steps=100, warmup=0, lr=1.0, schedule="constant")
    assert {constant.learning_rate(step) for step in range(100)} == {1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": []}, r"recipe\.ratios=\[\]: needs at least one"),
        ({"ratios": [2, 2], "topk": [1, 1]}, r"recipe\.ratios=\[2, 2\]: .*each once"),
        ({"topk": [8]}, r"recipe\.topk=\[8\]: needs one value for each of ratios=\[1, 4\]"),
        ({"topk": [8, 0]}, r"selection\.topk=0: must be at least 1"),
        ({"steps": 0}, r"recipe\.steps=0: must be at least 1"),
        ({"rows": 0}, r"recipe\.rows=0: must be at least 1"),
        ({"sparse_steps": 21}, r"recipe\.sparse_steps=21: must be at most recipe\.steps=20"),
        ({"lr": 0.0}, r"recipe\.lr=0\.0: must be above 0"),
        ({"target": "all"}, r"recipe\.target='all': must be one of own, served"),
        ({"schedule": "linear"}, r"recipe\.schedule='linear': must be one of cosine, constant"),
    ],
)
def test_recipes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHORT, **changes)


def test_layers_and_lengths_that_cannot_be():
    with pytest.raises(ValueError, match=r"recipe\.index_source_layers=\[7\]: the model has attention layers"):
        trainer_of(index_source_layers=(7,))
    with pytest.raises(ValueError, match=r"data\.length=48: .*window=128"):
        trainer_of(exclude_window=True)
