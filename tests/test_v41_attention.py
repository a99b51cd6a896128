"""`attend` against loops: windows, ratios, selections, sinks, both ways of reaching the selected keys, tiles."""

import dataclasses
from typing import Any

import naive_v41
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsity_lab.models.deepseek_v41 import attention
from sparsity_lab.models.deepseek_v41.attention import attend

ALL = ("gather", "mask")


@dataclasses.dataclass
class Inputs:
    q: torch.Tensor
    window: torch.Tensor
    compressed: torch.Tensor
    selected: torch.Tensor | None
    sink: torch.Tensor
    options: dict[str, Any]

    def run(self, **options) -> torch.Tensor:
        return attend(self.q, self.window, self.compressed, self.selected, self.sink, **self.options, **options)

    def naive(self) -> torch.Tensor:
        tensors = (self.q, self.window, self.compressed, self.selected, self.sink)
        return naive_v41.attend(*tensors, **self.options).float()


def make(*, start=0, rows=7, window_size=3, ratio=2, topk: int | None = 2, batch=2, heads=3, width=8, seed=0) -> Inputs:
    """Rows at `start` onwards, behind as many raw tokens as a cache would keep; topk None = everything visible."""
    torch.manual_seed(seed)
    earlier = min(start, window_size - 1)
    n = (start + rows) // ratio if ratio else 0
    selected = None
    if topk is not None:
        selected = torch.full((batch, rows, min(topk, n)), -1, dtype=torch.int32)
        for b in range(batch):
            for row in range(rows):
                visible = (start + row + 1) // ratio if ratio else 0
                some = torch.randperm(visible)[:topk].sort().values
                selected[b, row, : len(some)] = some
    return Inputs(
        torch.randn(batch, rows, heads, width) * 2,
        torch.randn(batch, earlier + rows, width),
        torch.randn(batch, n, width),
        selected,
        torch.randn(heads),
        {"start": start, "window_size": window_size, "ratio": ratio},
    )


@pytest.fixture
def path(request, monkeypatch):
    """Forces one way of reaching selected keys, and says which one ran."""
    monkeypatch.setattr(attention, "GATHER_COST", -1000 if request.param == "gather" else 1000)
    used = set()
    for way, function in (("gather", attention._gathered), ("mask", attention._masked)):

        def spy(*args, way=way, function=function):
            used.add(way)
            return function(*args)

        monkeypatch.setattr(attention, function.__name__, spy)
    yield request.param
    assert used == {request.param}


both = pytest.mark.parametrize("path", ALL, indirect=True)


@both
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("window_size", [1, 3, 50])
@pytest.mark.parametrize("start", [0, 9])
def test_selected_positions_against_loops(path, ratio, window_size, start):
    inputs = make(ratio=ratio, window_size=window_size, start=start)
    assert (inputs.selected == -1).any() or start, "the first rows see fewer positions than are asked for"
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("ratio", [0, 1, 2, 4])
@pytest.mark.parametrize("window_size", [1, 3, 50])
@pytest.mark.parametrize("start", [0, 9])
def test_all_visible_positions_against_loops(ratio, window_size, start):
    inputs = make(ratio=ratio, window_size=window_size, start=start, topk=None)
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 20),
    rows=st.integers(1, 12),
    window_size=st.integers(1, 24),
    ratio=st.sampled_from([0, 1, 2, 4]),
    topk=st.one_of(st.none(), st.integers(1, 6)),
    heads=st.integers(1, 3),
    tile_elements=st.sampled_from([1, 60, 400, 1 << 24]),
    gather_cost=st.sampled_from([-1000, 8, 1000]),
    seed=st.integers(0, 5),
)
def test_random_shapes_tiles_and_paths(start, rows, window_size, ratio, topk, heads, tile_elements, gather_cost, seed):
    topk = topk if ratio else None
    inputs = make(start=start, rows=rows, window_size=window_size, ratio=ratio, topk=topk, heads=heads, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GATHER_COST", gather_cost)
        torch.testing.assert_close(inputs.run(tile_elements=tile_elements), inputs.naive(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("topk", "way"), [(2, "gather"), (12, "mask")])
def test_few_selected_keys_are_gathered_and_many_masked(monkeypatch, topk, way):
    used = []
    for name in ("_gathered", "_masked"):
        function = getattr(attention, name)
        monkeypatch.setattr(attention, name, lambda *a, f=function, name=name: used.append(name) or f(*a))
    inputs = make(rows=40, ratio=1, topk=topk, heads=8)
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)
    assert set(used) == {{"gather": "_gathered", "mask": "_masked"}[way]}


@both
def test_nothing_selected_leaves_the_window(path):
    inputs = make(rows=9)
    inputs.selected = torch.full_like(inputs.selected, -1)
    window_only = dataclasses.replace(inputs, compressed=inputs.compressed[:, :0], selected=None)
    window_only.options = {**inputs.options, "ratio": 0}
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)
    torch.testing.assert_close(inputs.run(), window_only.naive(), rtol=0, atol=2e-6)


def test_selecting_everything_visible_equals_no_selection():
    inputs = make(rows=20, ratio=2, topk=10)
    everything = dataclasses.replace(inputs, selected=None)
    torch.testing.assert_close(inputs.run(), everything.run(), rtol=0, atol=2e-6)


@both
def test_a_large_sink_takes_the_probability(path):
    inputs = make()
    small = inputs.naive()
    inputs.sink = torch.full_like(inputs.sink, 12.0)
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)
    assert inputs.run().abs().max() < 0.05 * small.abs().max(), "it is in the denominator"
    inputs.sink = torch.full_like(inputs.sink, -1e4)
    torch.testing.assert_close(inputs.run(), inputs.naive(), rtol=0, atol=2e-6)


def test_sinks_belong_to_their_heads():
    inputs = make(heads=2)
    changed = dataclasses.replace(inputs, sink=inputs.sink + torch.tensor([0.0, 3.0]))
    assert torch.equal(inputs.run()[:, :, 0], changed.run()[:, :, 0])
    assert (inputs.run()[:, :, 1] - changed.run()[:, :, 1]).abs().max() > 0.01


@pytest.mark.parametrize("path", ["gather"], indirect=True)
def test_nan_in_a_position_nobody_selected_does_not_leak(path):
    inputs = make(rows=20, ratio=1, topk=2)
    inputs.selected = torch.where(inputs.selected == 0, -1, inputs.selected)
    clean = inputs.run()
    inputs.compressed[:, 0] = torch.nan  # what a missing selection would look up if -1 were taken for 0
    assert torch.equal(inputs.run(), clean)


@both
@pytest.mark.parametrize("tile_elements", [1, 1 << 24])
def test_future_tokens_do_not_matter(path, tile_elements):
    inputs, seen = make(rows=12, ratio=2, topk=2), 7
    before = inputs.run(tile_elements=tile_elements)[:, :seen]
    inputs.window[:, seen:] += 100
    inputs.compressed[:, seen // 2 :] += 100
    inputs.q[:, seen:] -= 3
    assert torch.equal(inputs.run(tile_elements=tile_elements)[:, :seen], before)


def test_future_tokens_do_not_matter_where_all_are_attended():
    inputs, seen = make(rows=12, ratio=2, topk=None), 7
    before = inputs.run()[:, :seen]
    inputs.window[:, seen:] += 100
    inputs.compressed[:, seen // 2 :] += 100
    assert torch.equal(inputs.run()[:, :seen], before)


@both
def test_softmax_is_in_float32_for_bfloat16(path):
    inputs = make(rows=12, topk=2)
    half = dataclasses.replace(inputs)
    half.q, half.window, half.compressed = (t.bfloat16() for t in (inputs.q, inputs.window, inputs.compressed))
    assert half.run().dtype == torch.bfloat16
    exact = half.naive()
    torch.testing.assert_close(half.run().float(), exact, rtol=0, atol=3e-2)
