"""The report in a real browser. Where none is installed these tests are skipped, but in CI (CI is set), which installs
one, they fail."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import Browser, Page
from test_report import NASTY, many, page_of, saved, whole_page

pytestmark = pytest.mark.slow
CONTRAST = 4.5  # of text to what is behind it (WCAG 2, level AA)
SCHEMES = ["light", "dark"]
COLOURS = """
Array.from(document.querySelectorAll("h1, h2, p, li, dt, dd, strong, span, a, th, td, caption, figcaption, summary, "
  + "code, button"), (element) => {
  let behind = element;
  while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  return [element.tagName, getComputedStyle(element).color,
    getComputedStyle(behind || document.documentElement).backgroundColor];
})
"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if browser.find() is None:
        if os.environ.get("CI"):
            pytest.fail("no browser, but CI has to have one: .ci/run installs it")
        pytest.skip(f"no browser installed (none of {', '.join(browser.NAMES)})")
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    failed = [{"scorer": "quest", "topk": 7, "reason": "selection.topk=7: " + "unbreakable" * 30}]
    file = folder / "report.html"
    file.write_text(whole_page(saved(folder / "tiny", many(), failed_cells=failed)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def page(chromium, path) -> Page:
    return chromium.open(path)


def column(page: Page, table: int, place: int) -> list[str | None]:
    """What the cells of a column sort by, from top to bottom; None for nothing."""
    rows = f"document.querySelectorAll('table.sortable')[{table}].tBodies[0].rows"
    return page.evaluate(f"Array.from({rows}, (row) => row.cells[{place}].dataset.sort ?? null)")


def test_nothing_goes_wrong_and_nothing_is_fetched(page, path):
    assert page.errors == []
    assert page.requests == [path.resolve().as_uri()]


def test_figures_are_there(page):
    sizes = page.evaluate(
        "Array.from(document.images, (i) => "
        "[i.complete, i.naturalWidth, i.naturalHeight, i.getBoundingClientRect().width])"
    )
    assert len(sizes) >= 5
    assert all(complete and min(rest) > 100 for complete, *rest in sizes)


@pytest.mark.parametrize("place", [2, 8])
def test_numbers_sort_on_click(page, place):
    """The mean coverage, which every row has, and the time, which bounds do not have: they stay at the end."""
    before = column(page, 0, place)
    for sign, direction in ((-1, "descending"), (1, "ascending"), (-1, "descending")):
        page.click("table.sortable thead button", place)
        found = column(page, 0, place)
        numbers = [float(value) for value in found if value is not None]
        assert found[len(numbers) :] == [None] * (len(found) - len(numbers))
        assert numbers == sorted(numbers, key=lambda value: sign * value)
        assert sorted(map(str, found)) == sorted(map(str, before))
        heads = page.evaluate(
            "Array.from(document.querySelector('thead tr').cells, (c) => c.getAttribute('aria-sort'))"
        )
        assert heads == [direction if i == place else None for i in range(len(heads))]
    assert (None in before) == (place == 8)


def test_words_sort_by_keyboard(page):
    page.evaluate("document.querySelector('table.sortable thead button').focus()")
    page.press("Enter", "\r")
    found = column(page, 0, 0)
    assert found == sorted(found, key=natural)
    page.press("Enter", "\r")
    assert column(page, 0, 0) == sorted(found, key=natural, reverse=True)


def natural(text: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def test_sorting_keeps_rows_together(page):
    cells = "Array.from(document.querySelector('table.sortable tbody').rows, (r) => r.textContent)"
    before = page.evaluate(cells)
    page.click("table.sortable thead button", 4)
    assert sorted(page.evaluate(cells)) == sorted(before)


@pytest.mark.parametrize("width", [320, 375, 768, 1200])
def test_no_sideways_scrolling_of_the_page(chromium, path, width):
    page = chromium.open(path, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inside = page.evaluate(
        "Array.from(document.querySelectorAll('main > section > *'), (e) => e.getBoundingClientRect().right)"
    )
    assert max(inside) <= width + 0.5
    assert page.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=SCHEMES)
def test_contrast(chromium, path, dark):
    page = chromium.open(path, dark=dark)
    found = page.evaluate(COLOURS)
    assert len(found) > 100
    weak = {(tag, fore, back) for tag, fore, back in found if contrast(fore, back) < CONTRAST}
    assert not weak
    body = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert body < 0.05 if dark else body > 0.9
    assert page.evaluate("getComputedStyle(document.querySelector('.paper')).backgroundColor") == "rgb(255, 255, 255)"


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_it_prints_on_white(chromium, path, tmp_path):
    page = chromium.open(path, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_accessible_names(page):
    nameless = page.evaluate(
        "Array.from(document.querySelectorAll('[role=region], nav, section')).filter((e) =>"
        " !(e.getAttribute('aria-label') || document.getElementById(e.getAttribute('aria-labelledby')))).length"
    )
    assert nameless == 0
    levels = page.evaluate("Array.from(document.querySelectorAll('h1, h2, h3'), (e) => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_names_run_no_script(chromium, tmp_path):
    file = tmp_path / "nasty.html"
    failed = [{"scorer": NASTY, "reason": NASTY}]
    file.write_text(page_of(saved(tmp_path / "x", many(model=NASTY), failed_cells=failed)), encoding="utf-8")
    page = chromium.open(file)
    assert page.errors == []
    assert len(page.requests) == 1
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert NASTY in page.evaluate("document.querySelector('h1').textContent")


def test_the_browser_does_report_faults(chromium, tmp_path):
    """What the other tests rely on: errors and requests are seen."""
    file = tmp_path / "bad.html"
    file.write_text("<!DOCTYPE html><img src='missing.png'><script>console.error('oh'); nowhere()</script>")
    page = chromium.open(file)
    assert any("missing.png" in url for url in page.requests)
    assert len(page.errors) >= 3
