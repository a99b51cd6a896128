"""The table and the progress of a run, on a terminal and in a file."""

from __future__ import annotations

import contextlib
import io

import pytest
from tiny_results import tiny_results

from sparsity_lab import console
from sparsity_lab.results import merge_results


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def table_of(results, **options) -> str:
    out = io.StringIO()
    console.summary_table(results, out, **options)
    return out.getvalue()


def test_plain_table_is_aligned_and_says_the_frame() -> None:
    results = tiny_results(ratios=(1,), topk=(16,), saturated={(1, 16): 5})
    text = table_of(results)
    assert "\x1b" not in text
    header, *lines = text.splitlines()
    assert len(lines) == 5
    for words in (
        "scorer",
        "ratio",
        "k",
        "recall",
        "coverage",
        "oracle cov.",
        "relative cov.",
        "total cov.",
        "density",
    ):
        assert words in header
    assert "pool" not in header
    (row,) = [line for line in lines if line.startswith("quest")]
    frame = results.frame(())
    cell = frame[frame.scorer == "quest"].iloc[0]
    assert f"{cell.coverage:.3f} [{cell.coverage_low:.3f}-{cell.coverage_high:.3f}]" in row
    assert row.endswith("50 %")
    assert row.index(f"{cell.recall:.3f}") + 5 == header.index("recall") + len("recall")
    assert lines[-1].startswith("mean of 3 layers")


def test_pools_and_what_else_differs_get_columns() -> None:
    pooled = tiny_results(ratios=(1,), topk=(16,), pools=[None, (1, 4, 8)], documents=1)
    text = table_of(merge_results([pooled, tiny_results(ratios=(1,), topk=(16,), window=16)]))
    header = text.splitlines()[0]
    assert header.startswith("window")
    assert "4x8 of layer 1" in text
    assert "model" not in header


def test_undefined_values_are_dashes_and_one_document_has_no_interval() -> None:
    text = table_of(tiny_results(ratios=(1,), topk=(16,), documents=1, saturated={(1, 16): 10}))
    row = text.splitlines()[1]
    assert row.split()[3:] == ["-"] * 8 + ["100", "%"]
    measured = table_of(tiny_results(ratios=(1,), topk=(16,), documents=1)).splitlines()[1]
    assert "[" not in measured


def test_long_tables_show_cells_under_test_first() -> None:
    results = tiny_results(topk=(8, 16, 32, 64))
    lines = table_of(results, max_cells=10).splitlines()
    assert sum(line.startswith("quest") for line in lines) == 8
    assert lines[-1] == "22 of 32 cells are not shown (22 of them bounds); summary.csv has all"
    assert "not shown" not in table_of(results, max_cells=32)


@pytest.mark.parametrize("width", [80, 160])
def test_terminal_table_fits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    console.summary_table(tiny_results(), out)
    text = out.getvalue()
    assert "\x1b" in text
    assert "…" not in text
    assert ("the terminal is too narrow for worst head" in text) == (width == 80)
    assert "saturated" in text


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_at_most_every_ten_seconds_and_at_the_end() -> None:
    out, clock = io.StringIO(), Clock()
    with console.progress("tiny", file=out, clock=clock) as advance:
        for step in range(1, 31):
            clock.now += 1
            advance(step, 30)
    assert out.getvalue().splitlines() == [
        "tiny: 10/30, 20 s left",
        "tiny: 20/30, 10 s left",
        "tiny: 30/30 in 30 s",
    ]


def test_lines_tell_where_it_stopped() -> None:
    out, clock = io.StringIO(), Clock()
    with contextlib.suppress(KeyboardInterrupt), console.progress("tiny", file=out, clock=clock) as advance:
        advance(2, 30)
        raise KeyboardInterrupt
    assert out.getvalue() == "tiny: 2/30 when stopped, after 0 s\n"


def test_nothing_to_do_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("tiny"):
        pass
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_bar_on_a_terminal() -> None:
    out = Terminal()
    with console.progress("tiny", 4, file=out) as advance:
        for step in range(1, 5):
            advance(step, 4)
    assert "tiny" in out.getvalue()
    assert "4/4" in out.getvalue()


def test_durations() -> None:
    assert [console.duration(s) for s in (0.4, 59.6, 185, 7500)] == ["0 s", "1 min 0 s", "3 min 5 s", "2 h 5 min"]
