"""The report's page in a real browser: charts that have sizes, no errors, both colour schemes, and nothing hostile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from millpond.spark.report import Report
from millpond.spark.report.figures import TABLES
from tests.spark import report_history as history

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
CHARTS = ("Settled messages", "Waiting time", "Handling time", "Retries and other")
LISTS = ("Waiting and at work", "Failures by reason", "Failures by exception", "Slowest messages")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program, "the page is looked at in a browser: apt-get install chromium, or make test"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the history, as it was counted by hand: no Spark is needed to draw it."""
    tables = {name: pa.Table.from_pylist(rows) for name, rows in history.EXPECTED.items()}
    return Report(tables, history.NOW, timedelta(hours=1)).write_page(tmp_path_factory.mktemp("page") / "report.html")


class Opened:
    """A page, with all that went wrong in it and all that it asked for."""

    def __init__(self, page: Page, file: Path) -> None:
        self.page = page
        self.wrong: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())

    def card(self, title: str) -> Any:
        return self.page.locator("section.card", has=self.page.get_by_role("heading", name=title))

    def marks(self, title: str) -> list[dict[str, Any]]:
        """The bars, lines and dots of a card, as they were laid out."""
        found: list[dict[str, Any]] = (
            self.card(title)
            .locator(".mark")
            .evaluate_all(
                """marks => marks.map(mark => {
                const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
                return {kind: mark.getAttribute("class"), width: box.width, height: box.height,
                        colours: [style.fill, style.stroke, style.backgroundColor], d: mark.getAttribute("d")};
            })"""
            )
        )
        return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [1280, 390])
def test_charts_are_drawn(browser: Browser, file: Path, scheme: Literal["light", "dark"], width: int) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    opened = Opened(page, file)
    for title in (*CHARTS, *LISTS):
        marks = opened.marks(title)
        assert marks, title
        assert all(max(mark["width"], mark["height"]) > 1 for mark in marks), (title, marks)
    bars = [mark for mark in opened.marks("Settled messages") if "mark completed" in mark["kind"]]
    # Of the hours with 5 and with 2 completed ones the first is the higher, in proportion.
    assert [bar["height"] for bar in bars] == [pytest.approx(bars[1]["height"] * 2.5, rel=0.02), bars[1]["height"]]
    for title in ("Waiting time", "Handling time"):
        assert len([mark for mark in opened.marks(title) if mark["d"]]) == 3, "p50, p90, p99"
    shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (shown == "rgb(15, 22, 28)") == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert opened.wrong == []
    assert opened.asked == [file.as_uri()], "the page needs nothing else"
    page.close()


def test_what_the_reader_does(browser: Browser, file: Path) -> None:
    page = browser.new_page(color_scheme="light")
    opened = Opened(page, file)
    page.get_by_role("button").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 22, 28)"
    chart = opened.card("Settled messages").locator("svg.chart")
    chart.hover()
    tip = page.locator("#tip")
    assert "completed: " in tip.inner_text() and "failed: " in tip.inner_text()
    assert page.locator(".tile b").first.inner_text() == "11"
    page.get_by_label("Queue").select_option(history.MAIL)
    assert page.locator(".tile b").first.inner_text() == "2"
    assert opened.card("Failures by reason").locator(".bar .name").all_inner_texts() == ["max_crashes"]
    assert opened.wrong == []
    page.close()


def test_hostile_texts_are_texts(browser: Browser, file: Path) -> None:
    assert "<img src=x" not in file.read_text(), "no markup can stand in the data"
    page = browser.new_page()
    opened = Opened(page, file)
    assert page.get_by_label("Queue").locator("option", has_text=history.MAIL).count() == 1
    opened.card("Slowest messages").locator(".bar", has_text=str(history.id_of("o7"))).hover()
    assert "</script><img src=x onerror=alert('e')>" in page.locator("#tip").inner_text()
    assert page.locator("img").count() == 0
    assert opened.wrong == []
    page.close()


def test_nothing_to_show(browser: Browser, tmp_path: Path) -> None:
    tables = {name: pa.table({column: [] for column in columns}) for name, columns in TABLES.items()}
    page = browser.new_page()
    opened = Opened(page, Report(tables, history.NOW, timedelta(hours=1)).write_page(tmp_path / "empty.html"))
    assert page.locator(".empty").count() >= 8
    assert opened.wrong == []
    page.close()
