"""The report's page in a real browser: charts with sizes, no errors, both colour schemes, no injected markup."""

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
from tests.spark.report import report_history as history

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
LISTS = ("Waiting and at work", "What fails", "What is slow")


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
    """A page of the hand-counted history: drawing it needs no Spark."""
    tables = {name: pa.Table.from_pylist(rows) for name, rows in history.EXPECTED.items()}
    found = Report(
        tables, history.NOW, timedelta(hours=1), source="lake /data/<b>lake</b>, postgresql://shop:***@db/shop"
    )
    return found.write_page(tmp_path_factory.mktemp("page") / "report.html")


class Opened:
    """A page with its errors and requests."""

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
        """The bars, lines and dots of a card, with their layout."""
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
    # The bars of the hours with 5 and with 2 completed messages have heights in proportion.
    assert [bar["height"] for bar in bars] == [pytest.approx(bars[1]["height"] * 2.5, rel=0.02), bars[1]["height"]]
    for title in ("Waiting time", "Handling time"):
        assert len([mark for mark in opened.marks(title) if mark["d"]]) == 3, "p50, p90, p99"
    shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (shown == "rgb(15, 22, 28)") == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert opened.wrong == []
    assert opened.asked == [file.as_uri()], "the page needs nothing else"
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_three_questions_are_answered_first(browser: Browser, file: Path, width: int) -> None:
    """The name of the source, failures with an error and an example, slow messages; no id is cut."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    opened = Opened(page, file)
    assert page.locator("#source").inner_text() == "lake /data/<b>lake</b>, postgresql://shop:***@db/shop"
    assert page.title().startswith("lake /data/<b>lake</b>, postgresql://shop:***@db/shop · ")
    titles = page.locator("section.card h2").all_inner_texts()
    assert titles[0] == "What fails" and titles[1].startswith("What is slow")
    failed = opened.card("What fails").locator(".bar", has_text="retries used up")
    assert "TimeoutError: slow" in failed.inner_text() and str(history.id_of("o8")) in failed.inner_text()
    cut = "spans => spans.filter(span => span.scrollWidth > span.clientWidth + 1).length"
    assert page.locator(".bar .below").evaluate_all(cut) == 0
    if width < 500:
        assert page.locator(".bar .name").evaluate_all(cut) == 0
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible()
    assert page.locator(".scroll").evaluate_all(
        "all => all.every(one => getComputedStyle(one).overflowX === 'visible')"
    )
    assert opened.wrong == []
    page.close()


@pytest.fixture(scope="module")
def full_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page as of a large pond: long names, long errors, large numbers, many rows."""
    times = {f"{which}_{name}_s": 0.0123 for which in ("waiting", "handling") for name in ("p50", "p90", "p99", "max")}
    counts = {"per_second": 2910.4, "settled": 1_234_567_890, "completed": 1_111_111_101, "failed": 123_456_789}
    more = dict.fromkeys(("retried", "retries", "redeliveries", "unfinished"), 123_456_789)
    seen = {"first_at": history.NOW - timedelta(days=7), "last_at": history.NOW, "archived_at": history.NOW}
    texts = {
        "error": "ConnectTimeout: https://payments.example/v1/charges?customer=" + "1234567890" * 12,
        "reason": "the address of the customer is not valid: the postcode is missing",
        "state": "FAILED",
        "id": "8cc39fd9-2b6e-0a1d-3851-9c0f1fdb5163",
        "example_id": "8cc39fd9-2b6e-0a1d-3851-9c0f1fdb5163",
    }
    live = dict.fromkeys(("pending", "processing", "retryable", "due", "scheduled", "suspect"), 123_456)
    each = {"waiting_s": 12.3, "handling_s": 0.0456, "overdue_s": 184_000.0, "oldest_due_at": history.NOW}
    rest = {"deliveries": 12, "attempts": 10, "exception": "ConnectTimeout"}
    values = {**times, **counts, **more, **seen, **texts, **live, **each, **rest}

    def table(name: str, size: int) -> pa.Table:
        rows = [
            {
                "queue": f"eu-central.shop.stock-reservations.v{n}",
                "at": history.NOW - timedelta(hours=size - n),
                **values,
            }
            for n in range(size)
        ]
        return pa.Table.from_pylist([{column: row[column] for column in TABLES[name]} for row in rows])

    sizes = {"summary": 1, "by_time": 168, "by_queue_and_time": 168}
    tables = {name: table(name, sizes.get(name, 30)) for name in TABLES}
    source = ", ".join(f"postgresql://shop:***@db-{n}.internal/shop" for n in range(4))
    found = Report(tables, history.NOW, timedelta(hours=1), source=source)
    return found.write_page(tmp_path_factory.mktemp("full") / "report.html")


A4_INSIDE = 703
"""Width of a printed page inside its margins, in pixels of CSS."""


@pytest.mark.parametrize(("media", "width"), [("screen", 1280), ("screen", 390), ("print", A4_INSIDE)])
def test_no_number_is_cut_or_broken(
    browser: Browser, full_file: Path, media: Literal["screen", "print"], width: int
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.emulate_media(media=media)
    opened = Opened(page, full_file)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    lines = """all => Math.max(...all.map(one => {
        const range = document.createRange(); range.selectNodeContents(one);
        return new Set([...range.getClientRects()].map(box => Math.round(box.top))).size; }))"""
    assert page.locator("tbody td:not(.text):visible").evaluate_all(lines) == 1
    assert page.locator(".tile b").evaluate_all(lines) == 1
    wide = "all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"
    assert page.locator(".tile b").evaluate_all(wide) == []
    if media == "print":
        assert (
            page.locator("table:visible").evaluate_all(
                "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).length"
            )
            == 0
        )
    names = opened.card("Waiting and at work").locator(".bar .name")
    assert names.evaluate_all("all => Math.min(...all.map(one => one.clientWidth / one.parentNode.clientWidth))") > 0.5
    assert opened.wrong == []
    page.close()


def test_a_long_list_goes_on_on_the_next_printed_page(browser: Browser, full_file: Path) -> None:
    """The first page has more than the head, and charts are not drawn amid white space."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    opened = Opened(page, full_file)
    assert 3 <= page.pdf(format="A4").count(b"/Type /Page\n") <= 7
    page.emulate_media(media="print")
    assert page.locator("svg.chart").evaluate_all(
        """all => all.every(one => {
            const box = one.getBoundingClientRect(), drawn = one.viewBox.baseVal;
            return Math.abs(box.height / box.width - drawn.height / drawn.width) < 0.01; })"""
    )
    kept = "all => all.filter(one => getComputedStyle(one).breakInside === 'avoid').length"
    assert opened.page.locator(".card:not(:has(svg.chart))").evaluate_all(kept) == 0, "long lists may be divided"
    assert opened.page.locator(".card:has(svg.chart)").evaluate_all(kept) == 4
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
    assert opened.card("What fails").locator(".bar .name").all_inner_texts() == [f"{history.MAIL} · max_crashes"]
    assert opened.wrong == []
    page.close()


def test_hostile_texts_are_texts(browser: Browser, file: Path) -> None:
    assert "<img src=x" not in file.read_text(), "no markup can stand in the data"
    page = browser.new_page()
    opened = Opened(page, file)
    assert page.get_by_label("Queue").locator("option", has_text=history.MAIL).count() == 1
    opened.card("What is slow").locator(".bar", has_text=str(history.id_of("o7"))).hover()
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
