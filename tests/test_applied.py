"""`model.attention=sparse` from a configuration: what is applied, to which layers, and what is refused."""

from __future__ import annotations

import pytest
import tiny_models
from test_config import composed

from sparsity_lab import config
from sparsity_lab.documents import Document, Documents
from sparsity_lab.job import _load_model
from sparsity_lab.models.sparse import SparseModel
from sparsity_lab.record import record
from sparsity_lab.scorers import BASELINES

SPARSE = "model.attention=sparse"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_models.make(family, folder / family) for family in ("llama", "gemma2", "glm_moe_dsa")}


def settings(path, *overrides, name="recall"):
    return config.resolve(composed("model=hf", f"model.path={path}", *overrides, name=name))["model"]


def model(path, *overrides):
    loaded = _load_model(settings(path, SPARSE, *overrides))
    assert isinstance(loaded, SparseModel)
    return loaded


def test_every_field_reaches_the_model(paths):
    made = model(
        paths["llama"], "scorer=mean_key", "model.applied.compress_ratio=2", "model.applied.topk=5",
        "model.applied.window=7", "model.applied.share=kv_head", "model.applied.exclude_window=true",
        "model.applied.sinks=1", "model.applied.index_source_layers=[0,2]", "model.applied.candidate.source_layer=0",
        "model.applied.candidate.topk_blocks=4", "model.applied.candidate.block_size=2", "model.applied.dense_layers=1",
    )  # fmt: skip
    told = made.describe()
    assert told["selection"] == {
        "compress_ratio": 2, "topk": 5, "window": 7, "share": "kv_head", "exclude_window": True, "sinks": 1,
        "index_source_layers": (0, 2), "candidate": {"source_layer": 0, "topk_blocks": 4, "block_size": 2},
    }  # fmt: skip
    assert told["scorer"] == {"name": "mean_key", "head_reduction": "softmax"}
    assert (made.layers, made.selecting) == ([1, 2], [0, 2])
    assert str(told["selection"]["topk"]) in made.attention


@pytest.mark.parametrize(
    ("family", "overrides", "layers"),
    [
        ("llama", [], [0, 1, 2]),
        ("gemma2", [], [1, 3]),
        ("llama", ["model.applied.dense_layers=2"], [2]),
        ("llama", ["model.applied.layers=[0,2]"], [0, 2]),
        ("llama", ["model.applied.index_source_layers=[1]"], [1, 2]),
        ("llama", ["model.applied.index_source_layers=[0,2]", "model.applied.layers=index_sources"], [0, 2]),
    ],
)  # fmt: skip
def test_layers(paths, family, overrides, layers):
    assert model(paths[family], "scorer=quest", *overrides).layers == layers


@pytest.mark.parametrize("name", BASELINES)
def test_scorers_by_name(paths, name):
    assert model(paths["llama"], f"model.applied.scorer={name}").scorer.describe() == BASELINES[name]().describe()


def test_scorer_of_the_run_or_of_its_own(paths):
    assert model(paths["llama"]).scorer.describe() == {"name": "quest", "head_reduction": "softmax"}
    assert model(paths["llama"], "model.applied.scorer={name: quest, head_reduction: logit}").scorer.head_reduction == (
        "logit"
    )
    learned = model(paths["llama"], "scorer=lightning")
    assert learned.scorer.describe()["name"] == "lightning"
    assert config.resolve(composed(SPARSE))["model"]["applied"]["scorer"] == {
        "name": "lightning", "weights": "shipped"
    }  # fmt: skip


def test_jobs_without_it_share_their_passes(paths):
    """A scorer or an `applied` that applies to nothing keeps no passes apart."""
    options = ["model.applied.topk=8"], ["scorer=recency"], []
    assert len({str(settings(paths["llama"], *o)) for o in options}) == 1
    names = [composed("model=hf", f"model.path={paths['llama']}", *o).name for o in options]
    assert set(names) == {"llama-pydoc-2048"}
    sparse = [composed("model=hf", f"model.path={paths['llama']}", SPARSE, *o).name for o in options]
    assert len(set(sparse)) == 3


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", ["model.applied.topk=0"], "model.applied.topk=0: must be at least 1"),
        ("llama", ["model.applied.layers=some"], "model.applied.layers='some': must be null"),
        ("llama", ["model.applied.layers=[9]"], r"model.applied.layers=\[9\]: no full attention there"),
        ("gemma2", ["model.applied.dense_layers=4"], "model.applied.dense_layers=4: leaves no layer"),
        ("llama", ["model.applied.dense_layers=-1"], "model.applied.dense_layers=-1: must be at least 0"),
        ("llama", ["model.applied.scorer=other"], "scorer.name='other'"),
        ("llama", ["model.applied.scorer=learned"], "scorer.weights=shipped: indexers come with sparsity_lab for"),
        ("llama", ["model.applied.candidate.source_layer=1"], "model.applied.candidate.topk_blocks=None"),
        ("llama", ["model.applied.index_source_layers=[7]"], "the model has layers 0 to 2"),
        ("glm_moe_dsa", [], "model.attention=sparse: glm_moe_dsa has sparse attention of its own"),
    ],
)  # fmt: skip
def test_what_is_refused(paths, family, overrides, message):
    with pytest.raises(ValueError, match=message):
        model(paths[family], *overrides)


def test_experiments_without_a_scorer_need_one_named(paths):
    with pytest.raises(ValueError, match=r"model\.applied\.scorer=null"):
        settings(paths["llama"], SPARSE, name="record")
    made = settings(paths["llama"], SPARSE, "model.applied.scorer=quest", name="record")
    documents = Documents((Document(0, tiny_models.tokens(30)[0], "random"),), {"name": "random", "length": 30})
    with pytest.raises(ValueError, match=r"model\.attention=sparse: a recording would not hold"):
        record(_load_model(made), documents, paths["llama"] / "recording")


def test_v41_has_its_own(tmp_path):
    asked = config.resolve(composed("model=deepseek_v41", SPARSE))["model"]
    with pytest.raises(ValueError, match=r"model\.attention=.sparse.: must be one of native, dense"):
        _load_model(asked)
