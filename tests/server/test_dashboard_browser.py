"""The dashboard in a real browser: a failure is found, understood and retried; hostile texts stay texts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, expect

import millpond
from millpond import Message, Transport
from millpond.outcome import Ack, Outcome, Reject
from millpond.schedule import Periodic
from millpond.server.grants import Role
from millpond.server.run_server import RunningServer
from millpond.server.tokens import new_token
from tests.server.browsing import PATIENCE, Seen, chromium
from tests.server.live import live_server

HOSTILE = "</script><img src=x onerror=alert(1)>'\"{{7*7}}"
QUEUE = f"a/b?c&d {HOSTILE}"

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Place:
    """A database with a server, and its messages as a program changes them."""

    def __init__(self, url: str, running: RunningServer) -> None:
        self.url = url
        self.running = running

    def run(self, work: Callable[[Transport], Any]) -> Any:
        async def main() -> Any:
            store = await millpond.connect(self.url)
            try:
                return await work(store)
            finally:
                await store.close()

        with ThreadPoolExecutor(1) as other:  # this thread has the browser's event loop
            return other.submit(asyncio.run, main()).result()

    def publish(self, *messages: Message) -> list[Any]:
        return self.run(lambda store: store.publish(list(messages)))  # type: ignore[no-any-return]

    def work(self, queue: str, outcome: Callable[[Any], Outcome], limit: int = 1) -> None:
        async def claim(store: Transport) -> None:
            claims: Sequence[Any] = await store.claim([queue], limit)
            assert claims
            assert await store.settle([outcome(claim.receipt) for claim in claims]) == []

        self.run(claim)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    url = f"sqlite:///{tmp_path / 'pond.db'}"
    with live_server(url) as running:
        yield Place(url, running)


def fail(receipt: Any) -> Outcome:
    return Reject(
        receipt, "rejected", "ValueError: no such lamp 7", traceback="Traceback (most recent call last):\n  lamp"
    )


def test_a_failure_is_found_understood_and_retried(browser: Browser, place: Place) -> None:
    seen = Seen(browser, place.running.url)
    page = seen.page
    seen.open()
    expect(page.get_by_text("There is no queue yet")).to_be_visible()
    place.publish(Message(queue="orders", payload=b'{"lamp": 7, "to": ["you"]}', headers={"trace": "t1"}))
    row = page.get_by_role("row", name="orders")
    expect(row).to_be_visible()  # without a reload: the page is live
    expect(page.locator("#live")).to_have_text("Live")
    place.work("orders", fail)
    failed = page.get_by_role("link", name=re.compile("1 ?failed in the archive"))
    expect(failed).to_be_visible()
    failed.click()
    page.get_by_role("link", name="ValueError: no such lamp 7").click()
    page.locator("td.id a").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("FAILED")
    expect(page.locator("details pre")).to_contain_text("Traceback (most recent call last)")
    expect(page.locator("pre", has_text='"lamp": 7')).to_be_visible()
    expect(page.locator("dd", has_text="t1")).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("1 message published again.")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_contain_text("PENDING")
    expect(page.get_by_role("heading", name="Why it does not run")).to_be_visible()
    expect(page.get_by_text("no worker and no gRPC stream consumes the queue 'orders'")).to_be_visible()
    place.work("orders", Ack)
    expect(page.get_by_role("heading", level=1)).to_contain_text("COMPLETED")
    page.get_by_role("link", name="Failures").click()
    expect(page.get_by_text("Nothing failed, or all of it was retried.")).to_be_visible()
    page.get_by_role("link", name="Actions").click()
    expect(page.get_by_role("row", name="retry")).to_have_count(1)
    seen.check()


def test_groups_are_selected_confirmed_and_retried_by_keyboard(browser: Browser, place: Place) -> None:
    place.publish(*[Message(queue="orders", payload=b"1") for _ in range(3)], Message(queue="mail", payload=b"1"))
    place.work("orders", fail, limit=3)
    place.work("mail", lambda r: Reject(r, "rejected", "KeyError: 'x'"))
    seen = Seen(browser, place.running.url)
    page = seen.page
    seen.open("/failures")
    submit = page.get_by_role("button", name="Retry selected")
    expect(submit).to_be_disabled()
    page.get_by_label("Select 3 messages: ValueError").focus()
    page.keyboard.press("Space")
    expect(page.get_by_text("3 messages selected")).to_be_visible()
    place.publish(Message(queue="other", payload=b"1"))  # the page looks again, and the selection stays
    with page.expect_response(re.compile("/dashboard/failures")):
        pass
    expect(page.get_by_text("3 messages selected")).to_be_visible()
    submit.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Retry 3 messages?")).to_be_visible()
    expect(page.get_by_role("link", name="Go back")).to_be_focused()
    page.get_by_role("button", name="Retry 3 messages").press("Enter")
    expect(page.get_by_text("3 messages published again.")).to_be_visible()
    expect(page.get_by_text("KeyError")).to_be_visible()
    expect(page.get_by_text("ValueError")).to_have_count(0)
    page.get_by_label("Select all groups").check()
    expect(page.get_by_text("1 message selected")).to_be_visible()
    page.keyboard.press("/")
    expect(page.locator("#find")).to_be_focused()
    page.keyboard.type("mail")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("mail")
    seen.check()


def test_a_queue_is_paused_resumed_and_purged_with_the_number(browser: Browser, place: Place) -> None:
    place.publish(*[Message(queue="orders", payload=b"1") for _ in range(3)])
    place.work("orders", Ack, limit=2)
    seen = Seen(browser, place.running.url)
    page = seen.page
    seen.open("/queue?queue=orders")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("1 message will wait until you resume")).to_be_visible()
    page.get_by_role("link", name="Go back").click()
    expect(page.locator("main .state.paused")).to_have_count(0)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause the queue").click()
    expect(page.locator("main .state.paused")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("The queue continues.")).to_be_visible()
    page.get_by_label("older than").select_option("0")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete 2 messages").click()
    expect(page.get_by_text("2 messages deleted from the archive.")).to_be_visible()
    seen.check()


class Lake:
    """A lake with a file for each of the last days."""

    def days(self, since: date) -> dict[str, date]:
        return {str(n): since + timedelta(days=n) for n in range(30)}

    def count(self, file: str) -> dict[tuple[str, str], int]:
        return {("orders", "COMPLETED"): 40_000 + int(file), (QUEUE, "FAILED"): 7}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Names, keys, headers, bodies and errors that are markup, beside long and plain ones."""
    url = f"sqlite:///{tmp_path_factory.mktemp('hostile') / 'pond.db'}"
    with live_server(url, lake=Lake()) as running:
        place = Place(url, running)
        place.publish(
            Message(queue=QUEUE, payload=f'{{"{HOSTILE[:9]}": 1}}'.encode(), key=HOSTILE, headers={HOSTILE: HOSTILE}),
            *[Message(queue="orders", payload=b'{"number": 1}') for _ in range(60)],
            Message(queue="long" * 60, payload=b"\xff\xfe", headers={"content-type": "application/octet-stream"}),
        )
        error = f"ValueError: {HOSTILE}"
        place.work(QUEUE, lambda r: Reject(r, HOSTILE, error, traceback=f"Traceback {HOSTILE}"))
        place.work("orders", fail, limit=3)
        place.work("orders", Ack, limit=20)
        place.run(lambda store: store.periodic.declare([Periodic(name=HOSTILE, queue="orders", schedule="0 3 * * *")]))
        yield place


PAGES = ("", "/failures", "/messages", "/workers", "/periodic", "/streams", "/doctor", "/actions")


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        *(("light", 1280), ("dark", 390)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("light", 390), ("dark", 1280))),
    ],
)
def test_every_page_in_both_schemes_and_widths(
    browser: Browser, hostile: Place, scheme: Literal["light", "dark"], width: int, tmp_path: Path
) -> None:
    seen = Seen(browser, hostile.running.url, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = seen.page
    (failed,) = hostile.run(lambda store: store.operations.archived(QUEUE))
    others = ("/queue?queue=orders", f"/messages/{failed.id}", "/messages/none", "/queue?queue=none", "/none")
    for number, path in enumerate((*PAGES, *others)):
        seen.open(path)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        assert seen.fits(), f"{path} sticks out"
        assert seen.faint() == [], path
        if page.get_by_role("navigation").count():
            places = [link.bounding_box() for link in page.get_by_role("navigation").get_by_role("link").all()]
            assert all(place and place["x"] + place["width"] <= width for place in places), f"{path} hides pages"
        assert page.locator("img").count() == 0
        page.screenshot(path=tmp_path / f"{number}.png", full_page=True)
    shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (shown == "rgb(15, 22, 28)") == (scheme == "dark")
    page.get_by_role("button", name="Change the colours").click()
    changed = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert changed != shown
    seen.open()  # the choice stays
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == changed
    seen.check()


def test_a_schedule_is_paused_edited_and_resumed(browser: Browser, place: Place) -> None:
    place.run(lambda store: store.periodic.declare([Periodic(name="nightly", queue="orders", schedule="0 3 * * *")]))
    seen = Seen(browser, place.running.url)
    page = seen.page
    seen.open("/periodic")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("The schedule is paused")).to_be_visible()
    page.get_by_role("link", name="Edit").click()
    page.get_by_label("Schedule").fill("every 300")
    page.get_by_label("Missed times").select_option("all")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("The schedule is changed.")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("The schedule continues")).to_be_visible()
    (row,) = place.run(lambda store: store.periodic.all())
    assert (row.periodic.schedule, row.periodic.missed, row.paused) == ("every 300", "all", False)
    seen.check()


def test_days_of_the_lake_are_shown(browser: Browser, hostile: Place) -> None:
    seen = Seen(browser, hostile.running.url)
    seen.open("/queue?queue=orders")
    expect(
        seen.page.get_by_role("img", name=re.compile("Settled each day.*: 1,200,435 completed, 0 failed"))
    ).to_be_visible()
    table = seen.page.get_by_role("region", name="Settled each day, last 30 days, from the lake")
    expect(table.get_by_role("row")).to_have_count(31)
    seen.check()


def test_hostile_texts_are_texts(browser: Browser, hostile: Place) -> None:
    seen = Seen(browser, hostile.running.url)
    page = seen.page
    seen.open()
    page.get_by_role("link", name=QUEUE, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(QUEUE)
    page.get_by_role("link", name=f"ValueError: {HOSTILE}").first.click()
    page.locator("td.id a").first.click()
    expect(page.locator("details pre")).to_have_text(f"Traceback {HOSTILE}")
    expect(page.locator("dt", has_text=HOSTILE)).to_be_visible()
    assert page.locator("img, main script").count() == 0
    page.get_by_role("button", name="Retry").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel 1 message").click()
    expect(page.get_by_text("1 message cancelled.")).to_be_visible()
    seen.open("/queue?queue=" + "nope%3Cimg%20src%3Dx%3E")
    expect(page.get_by_role("heading", level=1)).to_have_text("Not found")
    assert page.locator("img").count() == 0
    seen.check()


def test_messages_are_read_page_by_page(browser: Browser, hostile: Place) -> None:
    seen = Seen(browser, hostile.running.url)
    page = seen.page
    seen.open("/messages?queue=orders")
    ids = page.locator("td.id a").all_inner_texts()
    page.get_by_role("link", name="Next page").click()
    expect(page.get_by_role("link", name="First page")).to_be_visible()
    ids += page.locator("td.id a").all_inner_texts()
    assert len(ids) == len(set(ids)) == 60
    expect(page.get_by_role("link", name="Next page")).to_have_count(0)
    page.get_by_label("Body contains").fill("nowhere")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No message matches.")).to_be_visible()
    seen.check()


def test_log_in_with_a_token(browser: Browser, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'pond.db'}"
    with live_server(url) as running:
        place = Place(url, running)
        place.publish(Message(queue="orders", payload=b"1"), Message(queue="secret", payload=b"1"))
        text, stored = new_token("anna", [Role.READ], ["orders"])
        place.run(lambda store: store.access.add_token(stored))
        running.state.tokens.forget()
        seen = Seen(browser, running.url)
        page = seen.page
        seen.open("/queue?queue=orders")
        expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
        page.get_by_label("Token").fill("mp_wrong_token")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown or has expired")
        page.get_by_label("Token").fill(text)
        page.get_by_label("Token").press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("orders")
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        (cookie,) = [cookie for cookie in seen.context.cookies() if cookie["name"].startswith("millpond_token")]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
        seen.open()
        expect(page.get_by_role("row")).to_have_count(2)
        seen.open("/queue?queue=secret")
        expect(page.get_by_role("heading", level=1)).to_have_text("You have no right to this")
        seen.open()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
        seen.check()


def test_the_page_returns_when_the_server_does(browser: Browser, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'pond.db'}"
    with live_server(url) as running:
        port = int(running.url.rpartition(":")[2])
        seen = Seen(browser, running.url)
        seen.open()
        expect(seen.page.locator("#live")).to_have_text("Live")
    expect(seen.page.locator("#live")).to_contain_text("No connection")
    with live_server(url, port=port) as running:
        Place(url, running).publish(Message(queue="orders", payload=b"1"))
        expect(seen.page.get_by_role("link", name="orders")).to_be_visible()
        expect(seen.page.locator("#live")).to_have_text("Live")
        seen.context.close()
