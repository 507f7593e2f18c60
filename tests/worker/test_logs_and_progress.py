"""Output of `millpond run`: logs for people and for programs, and progress lines."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console

from millpond import Millpond, NackMessage, RejectMessage
from millpond.cli import logs, progress_line
from millpond.worker.status import Rate, Status, status_line
from tests.waiting import until

Configure = Callable[..., io.StringIO]


@pytest.fixture
def configured() -> Iterator[Configure]:
    """Configure logging as the command does; returns the output."""
    root, ours = logging.getLogger(), logging.getLogger("millpond")
    before = root.handlers[:], root.level, ours.level

    def configure(form: logs.LogFormat = logs.LogFormat.TEXT, *, terminal: bool = False, **options: Any) -> io.StringIO:
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=200, color_system="standard" if terminal else None)
        logs.configure(form, "info", console, **{"secrets": [], "worker": None, **options})
        return out

    yield configure
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


def fail() -> None:
    raise ValueError("no carrier for hunter22")


def test_lines_for_people(configured: Configure) -> None:
    out = configured(secrets=["hunter22", "x"], worker=3)
    log = logging.getLogger("shop")
    log.debug("not shown")
    log.info("connected to postgresql://me:hunter22@host/x")
    log.warning("[brackets] are no markup")
    try:
        fail()
    except ValueError:
        log.exception("failed", extra={"queue": "orders", "message_id": "0190", "correlation_id": "0190"})
    first, second, third, *trace = out.getvalue().splitlines()
    assert first[8:] == "  3 INFO     connected to postgresql://me:***@host/x"
    assert second.endswith("WARNING  [brackets] are no markup")
    assert third.endswith("ERROR    failed  [orders 0190]")
    assert trace[-1] == "ValueError: no carrier for ***"
    assert "hunter22" not in out.getvalue() and "\x1b" not in out.getvalue()


def test_colours_on_a_terminal(configured: Configure) -> None:
    out = configured(terminal=True)
    logging.getLogger("shop").error("failed")
    assert "\x1b[31m" in out.getvalue()


def test_objects_for_programs(configured: Configure) -> None:
    out = configured("json", secrets=["hunter22"])
    log = logging.getLogger("shop")
    log.info("line one\nline two", extra={"count": 3, "thing": object(), "secret": "it is hunter22"})
    try:
        fail()
    except ValueError:
        log.exception("failed")
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (first["level"], first["logger"], first["message"]) == ("info", "shop", "line one\nline two")
    assert (first["count"], first["secret"]) == (3, "it is ***")
    assert first["thing"].startswith("<object")
    assert "message_id" not in first
    assert second["exception"].endswith("ValueError: no carrier for ***")


@pytest.mark.parametrize("form", ["text", "json"])
async def test_log_lines_of_a_handler_name_its_message(configured: Configure, form: logs.LogFormat) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("orders")
    async def ship(body: int) -> None:
        await asyncio.sleep(0)
        logging.getLogger("shop").info("shipping")

    @pond.subscriber("mails")
    def mail(body: int) -> None:
        logging.getLogger("shop").info("mailing")

    out = configured(form)
    async with pond.testing() as test:
        order = await pond.publish("orders", 1, headers={"correlation-id": "c-7"})
        letter = await pond.publish("mails", 1)
        await test.run()
    lines = sorted(line for line in out.getvalue().splitlines() if "shipping" in line or "mailing" in line)
    if form == "json":
        about = {entry["message"]: entry for entry in map(json.loads, lines)}
        assert about["shipping"]["correlation_id"] == "c-7"
        assert about["shipping"]["message_id"] == str(order)
        assert (about["mailing"]["queue"], about["mailing"]["message_id"]) == ("mails", str(letter))
    else:
        text = out.getvalue()
        assert f"shipping  [orders {order} c-7]" in text
        assert f"mailing  [mails {letter}]" in text, "an id is logged once"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_correlation_id_of_any_publisher_forges_no_line(configured: Configure, form: logs.LogFormat) -> None:
    """Nor does it control the terminal, or fill the log"""
    out = configured(form)
    forged = "c-7\n12:34:56 ERROR    forged \x1b[2J" + "x" * 60_000
    logging.getLogger("shop").warning("failed", extra={"message_id": "0190", "correlation_id": forged})
    (line,) = out.getvalue().splitlines()
    assert "c-7" in line and "\x1b" not in line and len(line) < 500


async def test_a_traceback_begins_with_the_handler(configured: Configure) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("a")
    async def ship(body: int) -> None:
        await asyncio.sleep(0)
        fail()

    @pond.subscriber("b")
    def ship_in_a_thread(body: int) -> None:
        fail()

    out = configured()
    async with pond.testing(raise_errors=False) as test:
        ids = [await pond.publish("a", 1), await pond.publish("b", 1)]
        await test.run()
        rows = await (await pond.transport).operations.find(ids)
    stored = "".join(row.failed_attempts[0].traceback or "" for row in rows)
    for text in (out.getvalue(), stored):
        assert text.count("ValueError: no carrier") == 2
        assert "in ship\n" in text and "in ship_in_a_thread\n" in text
        assert "handler_pool.py" not in text and "threads.py" not in text


async def test_a_reason_is_logged_once(configured: Configure) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("a")
    async def ship(body: int) -> None:
        raise RejectMessage("no such sku") if body else NackMessage("no carrier", delay=5)

    out = configured()
    async with pond.testing() as test:
        await pond.publish_many("a", [0, 1])
        await test.run()
    text = out.getvalue()
    assert "attempt 1: FAILED: no such sku\n" in text and text.count("no such sku") == 1
    assert "attempt 1: again in 5 s: no carrier\n" in text


def test_a_line_of_progress() -> None:
    status = Status(True, 1_600, {"ack": 12_000, "nack": 30, "reject": 1, "published": 5})
    assert status_line(status, 1234.5) == "1,234/s, 12,031 handled, 1,600 in flight, 30 retried, 1 failed"
    assert status_line(Status(counts={"lease lost": 2}), 0).endswith("0 failed, 2 leases lost")


def test_workers_add_up() -> None:
    total = Status(False, 1, {"ack": 1}) + Status(True, 2, {"ack": 2, "nack": 1})
    assert total == Status(True, 3, {"ack": 3, "nack": 1})


def test_a_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("millpond.worker.status.monotonic", lambda: now)
    rate = Rate()
    seen = []
    for total in (0, 10, 20, 30, 30, 30, 30, 30):
        value = rate(total)
        seen.append(None if value is None else round(value))
        now += 1.0
    assert seen == [None, 10, 10, 10, 7, 3, 0, 0]


def test_a_handful_of_messages_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages in 80 ms are no 37 per second."""
    now = 0.0
    monkeypatch.setattr("millpond.worker.status.monotonic", lambda: now)
    rate = Rate()
    assert rate(0) is None
    now = 0.08
    assert rate(3) is None
    assert rate(500) is None, "the time is too short"
    now = 2.0
    assert rate(3) is None, "too few messages"
    assert status_line(Status(counts={"ack": 3}), None) == "3 handled, 0 in flight, 0 retried, 0 failed"


async def test_elsewhere_the_log_tells_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    counts = {"ack": 1}
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO):
        async with progress_line.show(lambda: Status(True, 0, dict(counts)), console, every=0.01):
            await until(lambda: len(caplog.records) == 1)
            await asyncio.sleep(0.05)
            assert len(caplog.records) == 1, "an idle worker is quiet"
            counts["ack"] = 7
            await until(lambda: len(caplog.records) == 2)
            counts["reject"] = 1
    assert [record.getMessage().split(", ")[0] for record in caplog.records] == ["1 handled", "7 handled", "8 handled"]


async def test_on_a_terminal_one_line_lives() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    async with progress_line.show(lambda: Status(True, 3, {"ack": 42}), console):
        await until(lambda: "42 handled, 3 in flight" in out.getvalue())
    assert out.getvalue().rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "and leaves nothing behind"
