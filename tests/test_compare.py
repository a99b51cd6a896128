"""A against B: differences document by document, who is paired with whom, and what cannot be compared."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_results import LAYERS, tiny_results

from sparsity_lab.compare import against, levels
from sparsity_lab.figures.table import behind_sources
from sparsity_lab.results import Results

POOLS = [None, (0, 4, 8), (1, 8, 8)]


def changed(results: Results, metric: str, amount: dict[str, float]) -> Results:
    """The same results with each row of a document shifted."""
    tallies = results.tallies.copy()
    tallies[f"{metric}_sum"] += tallies["document"].map(amount) * tallies[f"{metric}_n"]
    return Results(tallies, results.cells, results.manifest)


def by_hand(a: Results, b: Results, one: str, other: str, metric: str) -> np.ndarray:
    """A - B of a pair of cells, one value a document: the mean over its layers."""
    out = []
    for document in sorted(set(a.tallies["document"]) & set(b.tallies["document"])):
        means = []
        for side, cell in ((a, one), (b, other)):
            rows = side.tallies[(side.tallies["cell_id"] == cell) & (side.tallies["document"] == document)]
            values = [sum(r[f"{metric}_sum"]) / sum(r[f"{metric}_n"]) for _, r in rows.groupby("layer")]
            means.append(sum(values) / len(values))
        out.append(means[0] - means[1])
    return np.array(out)


def test_differences_are_paired_by_document_with_their_own_interval() -> None:
    a = tiny_results(ratios=(1,), documents=4)
    b = changed(a, "coverage", {"document0": 0.1, "document1": 0.2, "document2": 0.1, "document3": 0.4})
    frame = against(a, b).frame(()).set_index("cell_id")
    picks = np.random.default_rng(0).integers(4, size=(1000, 4))
    for cell in frame.index:
        want = by_hand(a, b, cell, cell, "coverage")
        np.testing.assert_allclose(want, [-0.1, -0.2, -0.1, -0.4])
        row = frame.loc[cell]
        assert row["coverage"] == pytest.approx(want.mean())
        ends = np.percentile(want[picks].mean(1), [2.5, 97.5])
        np.testing.assert_allclose([row["coverage_low"], row["coverage_high"]], ends)
        assert row["recall"] == row["recall_low"] == row["recall_high"] == 0
        assert row["documents"] == 4
    assert set(frame["scorer"]) == {"quest"}, "bounds are left out"


def test_only_common_documents_and_layers_count() -> None:
    a, b = tiny_results(documents=3), tiny_results(documents=5)
    b = Results(b.tallies[b.tallies["layer"] > 0], b.cells, {})
    found = against(b, a)
    frame = found.frame()
    assert set(frame["documents"]) == {3}
    assert set(frame["layer"]) == set(LAYERS) - {0}
    assert set(found.tallies["layer"]) == {1, 2}
    b.tallies["document"] += "x"
    with pytest.raises(ValueError, match="no document in common"):
        against(a, b)


def test_what_is_one_value_on_each_side_is_what_is_compared() -> None:
    a, b = tiny_results(scorers=("quest",)), tiny_results(scorers=("mean_key",))
    found = against(a, b, "left", "right")
    assert set(found.cell_frame()["scorer"]) == {"quest \u2212 mean_key"}
    assert found.told == ("A: left (scorer quest)", "B: right (scorer mean_key)")
    assert found.frame(())["recall"].to_numpy() == pytest.approx(0.1)
    assert {found.cells[one]["topk"] for one in found.pairs} == {16, 32, 64}
    for one, other in found.pairs.items():
        assert a.cells[one]["topk"] == b.cells[other]["topk"]
        assert a.cells[one]["compress_ratio"] == b.cells[other]["compress_ratio"]


def test_common_scorers_are_paired_with_themselves() -> None:
    a, b = tiny_results(scorers=("quest", "mean_key")), tiny_results(scorers=("quest",))
    found = against(a, b)
    assert {(a.cells[x]["scorer"], b.cells[y]["scorer"]) for x, y in found.pairs.items()} == {("quest", "quest")}
    assert found.frame(())["coverage"].to_numpy() == pytest.approx(0)


def test_other_models_can_be_compared() -> None:
    a, b = tiny_results(model="small"), tiny_results(model="large")
    assert set(against(a, b).cell_frame()["model"]) == {"small \u2212 large"}


def test_what_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match=r"one against other: no cell .* topk"):
        against(tiny_results(topk=(16,)), tiny_results(topk=(32,)), "one", "other")
    others = tiny_results(scorers=("quest", "mean_key"))
    for cell in others.cells.values():
        cell["scorer"] = cell["scorer"].replace("quest", "third")
    with pytest.raises(ValueError, match=r"no cell of the one has a partner .* \(same scorer\)"):
        against(tiny_results(scorers=("quest",)), others)
    twins = tiny_results()
    twins.cells |= {f"{key}-twin": dict(cell) for key, cell in twins.cells.items()}
    with pytest.raises(ValueError, match="have the same scorer and selection"):
        against(tiny_results(), twins)


def test_levels_pair_every_pool_with_its_single_level_cell() -> None:
    results = tiny_results(pools=POOLS, ratios=(1,))
    found = levels(results)
    assert len(found.pairs) == 2 * 3
    for one, other in found.pairs.items():
        a, b = results.cells[one], results.cells[other]
        assert b["candidate_source_layer"] is None
        assert {k: v for k, v in a.items() if "candidate" not in k} == {
            k: v for k, v in b.items() if "candidate" not in k
        }
        want = by_hand(results, results, one, other, "coverage").mean()
        got = found.frame(()).set_index("cell_id").loc[one, "coverage"]
        assert got == pytest.approx(want)
        assert want == pytest.approx(-0.05 - 0.001 * a["candidate_source_layer"])
    with pytest.raises(ValueError, match="no two-level cell"):
        levels(tiny_results())


def test_two_runs_of_levels_can_be_compared() -> None:
    a = tiny_results(pools=POOLS)
    b = changed(a, "coverage", {"document0": 0.1, "document1": 0.2, "document2": 0.3})  # on both levels: no change
    found = against(levels(a), levels(b))
    assert found.what == "A \u2212 B of two-level \u2212 single-level"
    assert len(found.frame(())) == 2 * 2 * 3
    assert found.frame(())["coverage"].to_numpy() == pytest.approx(0, abs=1e-12)


def test_restricting_keeps_the_difference() -> None:
    a, b = tiny_results(pools=POOLS), tiny_results(pools=POOLS)
    b = changed(b, "recall", dict.fromkeys(("document0", "document1", "document2"), 0.25))
    found = behind_sources(against(a, b))
    assert set(found.tallies["layer"]) == {2}
    one = found.only(list(found.cells)[:1])
    assert len(one.cells) == 1
    assert one.frame(())["recall"].to_numpy() == pytest.approx(-0.25)


def test_restricting_a_difference_of_differences() -> None:
    a = tiny_results(pools=POOLS)
    b = changed(a, "recall", {"document0": 0.1, "document1": 0.2, "document2": 0.3})
    found = against(levels(a), levels(b))
    some = found.only(list(found.cells)[:2])
    np.testing.assert_allclose(some.frame(())["recall"], 0, atol=1e-12)
    whole = found.frame(()).set_index("cell_id").loc[list(some.cells)]
    assert set(whole["documents"]) == set(some.frame(())["documents"]) == {3}


def test_a_document_that_one_cell_lacks_does_not_count_for_it() -> None:
    a, b = tiny_results(ratios=(1,)), tiny_results(ratios=(1,))
    short = "quest-None-1-16"
    gone = (b.tallies["cell_id"] == short) & (b.tallies["document"] == "document2")
    found = against(a, Results(b.tallies[~gone], b.cells, {}))
    documents = found.frame(()).set_index("cell_id")["documents"]
    assert documents[short] == 2
    assert set(documents.drop(short)) == {3}
    first = found.first().frame(()).set_index("cell_id")
    assert first.loc[short, "coverage"] == pytest.approx(by_hand_mean(a, short, ("document0", "document1")))


def by_hand_mean(results: Results, cell: str, documents: tuple[str, ...]) -> float:
    rows = results.tallies[(results.tallies["cell_id"] == cell) & results.tallies["document"].isin(documents)]
    return float((rows["coverage_sum"] / rows["coverage_n"]).mean())


def test_behind_sources() -> None:
    with pytest.raises(ValueError, match="no cell of these results has a candidate pool"):
        behind_sources(tiny_results())
    with pytest.raises(ValueError, match="no measured layer lies behind candidate source layer 2"):
        behind_sources(tiny_results(pools=[(2, 4, 8)]))
