"""Suspects run in child processes of `millpond run`: a poison is FAILED by its own deaths and delays no message."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond import Delivery, Millpond, State
from millpond.worker import child_messages, claim_loop, suspects
from millpond.worker import worker as worker_module
from tests.waiting import ended, is_alive, until
from tests.worker.conftest import became, counts, drained, on, row, suspect, working
from tests.worker.shop import Shop, observing

pytestmark = pytest.mark.slow_on_servers

APP = """
import asyncio, os, re, signal, threading, time
from millpond import Delivery, Millpond

pond = Millpond({url!r})


def note(*words):
    with open("notes", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")


def explode():
    while "outlives" not in open("notes").read():
        time.sleep(0.01)
    os._exit(7)


@pond.on_start
def started():
    note("started", os.getpid(), os.getppid())
    if os.path.exists("no children") and os.getppid() in [int(line.split()[1]) for line in open("notes")]:
        raise RuntimeError("this port is taken")


@pond.on_stop
def stopped():
    note("stopped", os.getpid())


async def do(body, delivery):
    note(body, os.getpid(), delivery.claim.deliveries, delivery.claim.crashes)
    match body:
        case "exit":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            re.match("(a+)+$", "a" * 64 + "b")  # it does not end, and holds the interpreter's lock
        case "bomb":
            threading.Thread(target=explode, daemon=True).start()
        case "outlives" if delivery.claim.crashes == 2:
            await asyncio.sleep(600)
        case "waits":
            while not os.path.exists("open"):
                await asyncio.sleep(0.02)


@pond.subscriber("a", timeout=1)
async def quick(body: str, delivery: Delivery):
    await do(body, delivery)


@pond.subscriber("b", "c")
async def patient(body: str, delivery: Delivery):
    await do(body, delivery)


@pond.subscriber("single", max_workers=1)
async def single(body: str, delivery: Delivery):
    await do(body, delivery)


@pond.subscriber("thread")
def in_thread(body: str, delivery: Delivery):
    note(body, os.getpid())
    while body == "hangs":
        time.sleep(1)
"""

databases = on("sqlite", "postgresql", "mariadb")


@pytest.fixture
def shop(tmp_path: Path, url: str) -> Iterator[Shop]:
    shop = Shop(tmp_path, url, APP)
    yield shop
    shop.close()


@databases
async def test_a_poison_is_failed_by_its_own_deaths(pond: Millpond, shop: Shop) -> None:
    """It exits, or is killed. Innocent suspects and other messages are completed; the worker lives on."""
    poison = {kind: await suspect(pond, "a", kind) for kind in ("exit", "kill")}
    innocent = [await suspect(pond, "a", "innocent", crashes=n) for n in (2, 3, 5)]
    others = await pond.publish_many("a", ["other"] * 20)
    process = shop.start("shop", "--queues", "a")
    errors = {}
    for kind, id_ in poison.items():
        failed = await became(pond, id_, State.FAILED)
        assert (failed.reason, failed.deliveries, failed.attempts) == ("max_crashes", 3, 0)
        errors[kind] = failed.error
    ran = "its process ended while it ran alone there: {}; crash 3 (limit 3)"
    assert errors == {
        "exit": ran.format("exit code 9"),
        "kill": ran.format("killed by SIGKILL"),
    }
    for id_ in (*innocent, *others):
        await became(pond, id_, State.COMPLETED)
    process.terminate()
    assert await ended(process) == 0, shop.stderr
    assert "25 handled" in shop.stderr and "2 failed" in shop.stderr
    (worker, *children) = shop.workers()
    assert worker == process.pid
    assert {note[1] for note in shop.notes if note[0] == "other"} == {str(worker)}
    ran_alone = [note for note in shop.notes if note[0] in (*poison, "innocent")]
    assert {int(note[1]) for note in ran_alone} <= set(children) and len(ran_alone) == 5
    assert not any(is_alive(child) for child in children)


@databases
async def test_a_poison_that_hangs_is_failed_by_its_own_death(
    pond: Millpond, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the interpreter's lock: its process cannot report the timeout, and is killed."""
    monkeypatch.setattr(suspects, "_TIMEOUT_WITHIN", 0.5)
    monkeypatch.chdir(shop.folder)

    @pond.subscriber("a", timeout=0.5)
    async def handle(body: str) -> None: ...

    id_ = await suspect(pond, "a", "hang")
    async with working(pond, child_command=[sys.executable, "-m", "millpond", "run", "shop", "--child"]):
        failed = await became(pond, id_, State.FAILED)
    assert (failed.reason, failed.deliveries, failed.attempts) == ("max_crashes", 3, 0)
    assert failed.error == "its process ended while it ran alone there: killed because it hung; crash 3 (limit 3)"
    (child,) = shop.workers()
    assert not is_alive(child)


@databases
async def test_slow_suspects_delay_no_other_message(pond: Millpond, shop: Shop) -> None:
    """Neither in their own queue nor in others, and suspects do not wait for each other."""
    slow = [await suspect(pond, queue, "waits") for queue in "bc" for _ in range(2)]
    quick = await suspect(pond, "a", "quick", due_in=3600)
    process = shop.start("shop", "--queues", "a,b,c")
    await until(lambda: sum(note[0] == "waits" for note in shop.notes) == 4)
    for queue in "abc":
        await pond.publish_many(queue, ["other"] * 20)
    assert await (await pond.transport).operations.reschedule([quick], delay=0) == [quick]

    async def others_are_done() -> bool:
        return [(await counts(pond, queue)).get(State.COMPLETED) for queue in "abc"] == [21, 20, 20]

    await until(others_are_done)
    assert [(await row(pond, id_)).state for id_ in slow] == [State.PROCESSING] * 4
    assert (await row(pond, quick)).state is State.COMPLETED
    (shop.folder / "open").touch()
    for id_ in slow:
        await became(pond, id_, State.COMPLETED)
    process.terminate()
    assert await ended(process) == 0, shop.stderr


@pytest.mark.long_on_servers
@databases
async def test_the_death_of_the_worker_ends_its_children(pond: Millpond, shop: Shop) -> None:
    """Also that of a child that holds the interpreter's lock."""
    for queue, body in (("b", "waits"), ("c", "hang")):
        await suspect(pond, queue, body)
    process = shop.start("shop", "--queues", "b,c")
    await until(lambda: {"waits", "hang"} <= {note[0] for note in shop.notes})
    children = shop.workers()[1:]
    process.kill()
    await ended(process)
    await until(lambda: not any(is_alive(child) for child in children))


@pytest.mark.slow
@databases
async def test_the_death_of_the_worker_fails_no_suspect(pond: Millpond, shop: Shop) -> None:
    waiting, hanging = await suspect(pond, "b", "waits"), await suspect(pond, "c", "hang")
    process = shop.start("shop", "--queues", "b,c")
    await until(lambda: {"waits", "hang"} <= {note[0] for note in shop.notes})
    following = shop.start("shop", "--queues", "b")
    await observing(shop.url, 2)
    process.kill()
    await ended(process)
    (shop.folder / "open").touch()
    done = await became(pond, waiting, State.COMPLETED)
    assert done.deliveries == 4, "the death counts as a crash, and fails no message"
    assert (await row(pond, hanging)).state is not State.FAILED
    following.terminate()
    assert await ended(following) == 0, shop.stderr


@pytest.mark.long_on_servers
@databases
async def test_a_stop_gives_a_suspect_back(pond: Millpond, shop: Shop) -> None:
    """After the grace period, uncounted; also one in a thread, or one that holds the interpreter's lock."""
    ids = [await suspect(pond, queue, body) for queue, body in (("b", "waits"), ("thread", "hangs"), ("c", "hang"))]
    process = shop.start("shop", "--queues", "b,c,thread", "--graceful-timeout", "200ms")
    await until(lambda: {"waits", "hangs", "hang"} <= {note[0] for note in shop.notes})
    for child in shop.workers()[1:]:
        os.kill(child, signal.SIGTERM)  # a service manager sends it to all processes
    process.terminate()
    assert await ended(process) == 0, shop.stderr
    for id_ in ids:
        found = await row(pond, id_)
        assert (found.state, found.deliveries, found.attempts, found.crashes) == (State.PENDING, 3, 0, 2)
    assert "killed because it hung; this is no crash" in shop.stderr and "crash 3" not in shop.stderr
    assert not any(is_alive(pid) for pid in shop.workers())


@pytest.mark.long_on_servers
@databases
async def test_a_stop_lets_a_suspect_finish(pond: Millpond, shop: Shop) -> None:
    id_ = await suspect(pond, "b", "waits")
    process = shop.start("shop", "--queues", "b")
    await until(lambda: any(note[0] == "waits" for note in shop.notes))
    process.terminate()
    await until(lambda: "stopping:" in shop.stderr)
    (shop.folder / "open").touch()
    assert await ended(process) == 0, shop.stderr
    assert (await row(pond, id_)).state is State.COMPLETED
    assert [note[0] for note in shop.notes].count("stopped") == 2, (
        "the functions of on_stop were called in the child too"
    )


@pytest.mark.long_on_servers
@databases
async def test_a_child_is_used_again_and_fails_no_innocent_then(pond: Millpond, shop: Shop) -> None:
    """The bomb of one message explodes while the next one runs in the same process."""
    bomb = await suspect(pond, "single", "bomb")
    innocent = await suspect(pond, "single", "outlives")
    process = shop.start("shop", "--queues", "single", "--until-idle")
    assert await ended(process) == 0, shop.stderr
    assert (await row(pond, bomb)).state is State.COMPLETED
    found = await row(pond, innocent)
    assert (found.state, found.crashes) == (State.PENDING, 3), "given back, as it was not the first in its process"
    process = shop.start("shop", "--queues", "single")
    assert (await became(pond, innocent, State.COMPLETED)).deliveries == 4
    process.terminate()
    assert await ended(process) == 0, shop.stderr
    first, second, third = [int(note[1]) for note in shop.notes if note[0] in ("bomb", "outlives")]
    assert first == second != third


@on("sqlite")
async def test_until_idle_runs_suspects_too(pond: Millpond, shop: Shop) -> None:
    for _ in range(12):
        await suspect(pond, "single", "innocent")
    process = shop.start("shop", "--queues", "single", "--until-idle")
    assert await ended(process) == 0, shop.stderr
    assert await counts(pond, "single") == {State.COMPLETED: 12}
    assert len(shop.workers()) == 1 + 1, "one child ran them one after the other"


@pytest.mark.slow
@on("sqlite")
async def test_without_children_suspects_wait_and_other_messages_do_not(pond: Millpond, shop: Shop) -> None:
    (shop.folder / "no children").touch()
    id_ = await suspect(pond, "b", "innocent")
    process = shop.start("shop", "--queues", "b")
    await pond.publish_many("b", ["other"] * 20)
    await until(lambda: "no child process for suspects (exit code 1); the next one starts in 1 s" in shop.stderr)
    assert (await counts(pond, "b"))[State.COMPLETED] == 20
    found = await row(pond, id_)
    assert (found.deliveries, found.crashes) == (2, 2) or found.state is State.PROCESSING
    (shop.folder / "no children").unlink()
    assert (await became(pond, id_, State.COMPLETED)).deliveries == 3
    process.terminate()
    assert await ended(process) == 0, shop.stderr


@on("memory", "sqlite")
async def test_an_embedded_worker_runs_suspects_among_others(pond: Millpond, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no children. However many crashes a message has, it runs, and is not FAILED by their number."""
    monkeypatch.setattr(claim_loop, "_SUSPECTS_EVERY", 0.1)
    inside: set[str] = set()
    together = asyncio.Event()

    @pond.subscriber("q", max_crashes=3)
    async def handle(body: str, delivery: Delivery) -> None:
        inside.add(body)
        if len(inside) == 4:
            together.set()
        await together.wait()

    for n in (2, 5, 20):
        await suspect(pond, "q", str(n), crashes=n)
    await pond.publish("q", "other")
    async with asyncio.timeout(60):
        await pond.run(until_idle=True, signals=False)
    assert await drained(pond) == {State.COMPLETED: 4}


@pytest.mark.long_on_servers
@databases
async def test_a_suspect_that_cannot_be_sent_to_its_child_fails_alone(
    pond: Millpond, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An integer of any size reaches the handler. Another message, which cannot be encoded, is FAILED with a reason."""
    real = child_messages.pack

    def refuse(message: child_messages.ToChild) -> bytes:
        if isinstance(message, child_messages.Run) and message.claim.message.headers.get("bad"):
            raise OverflowError("too large")
        return real(message)

    monkeypatch.setattr(child_messages, "pack", refuse)
    monkeypatch.chdir(shop.folder)

    @pond.subscriber("a")
    async def handle(body: str) -> None: ...

    large = await suspect(pond, "a", "innocent", headers={"n": 10**30})
    bad = await suspect(pond, "a", "innocent", headers={"bad": True})
    child = [sys.executable, "-m", "millpond", "run", "shop", "--child"]
    async with working(pond, child_command=child):
        await became(pond, large, State.COMPLETED)
        failed = await became(pond, bad, State.FAILED)
        await became(pond, await pond.publish("a", "other"), State.COMPLETED)
    assert (failed.reason, failed.error, failed.attempts) == ("undecodable", "OverflowError: too large", 0)


CHILD = """
import os, socket, sys
from millpond import Ack, Receipt
from millpond.message import new_id
from millpond.worker.child_messages import Idle, Lost, Settle, Started, Write, pack, read

worker = socket.socket(fileno=int(sys.argv[-1]))
worker.sendall(pack(Idle()))
if not os.path.exists("works"):
    open("works", "w").close()
    os._exit(9)
file = worker.makefile("rb")
receipt = read(file).claim.receipt
other = Receipt(new_id(), 7)
for message in Started(), Lost(other, True), Settle(Ack(other), False), Write(Ack(other)):
    worker.sendall(pack(message))
assert not read(file).ours
for message in Settle(Ack(receipt), False), Idle():
    worker.sendall(pack(message))
worker.recv(1)
"""


@on("sqlite")
async def test_the_death_of_a_child_that_has_not_begun_is_no_crash(
    pond: Millpond, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first child dies when it is ready. The next one reports a lost lease and outcomes of an earlier message."""
    monkeypatch.chdir(tmp_path)

    @pond.subscriber("q")
    async def handle(body: str) -> None: ...

    id_ = await suspect(pond, "q", "innocent", crashes=2)
    async with working(pond, child_command=[sys.executable, "-c", CHILD]):
        done = await became(pond, id_, State.COMPLETED)
    assert (done.deliveries, done.attempts) == (3, 1)


@on("sqlite")
async def test_a_suspect_is_cancelled_by_an_operator(pond: Millpond, shop: Shop) -> None:
    """Also one whose child does not react: that child is killed."""
    waits, hangs = await suspect(pond, "b", "waits"), await suspect(pond, "b", "hang")
    process = shop.start("shop", "--queues", "b")
    await until(lambda: {"waits", "hang"} <= {note[0] for note in shop.notes})
    assert sorted(await (await pond.transport).workers.cancel([waits, hangs])) == sorted([waits, hangs])
    for id_ in (waits, hangs):
        assert (await became(pond, id_, State.FAILED)).reason == "cancelled"
    process.terminate()
    assert await ended(process) == 0, shop.stderr


WAITING_CHILD = """
import os, socket, sys, time
from millpond import Ack
from millpond.worker.child_messages import Idle, Settle, Started, pack, read

worker = socket.socket(fileno=int(sys.argv[-1]))
file = worker.makefile("rb")
worker.sendall(pack(Idle()))
while (run := read(file)) is not None:
    worker.sendall(pack(Started()))
    while not os.path.exists("released"):
        time.sleep(0.01)
    for message in Settle(Ack(run.claim.receipt), False), Idle():
        worker.sendall(pack(message))
"""


@on("sqlite")
@pytest.mark.parametrize(("most", "each"), [(4, 2), (1, 1)])
async def test_subscribers_share_the_child_processes_evenly(
    pond: Millpond, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, each: int
) -> None:
    """More suspects wait for a free one. Each subscriber has one at least."""
    assert worker_module.MOST_CHILDREN == 10
    monkeypatch.setattr(worker_module, "MOST_CHILDREN", most)
    monkeypatch.chdir(tmp_path)

    async def handle(body: str) -> None: ...

    for queue in ("a", "b"):
        pond.subscriber(queue)(handle)
        for _ in range(3):
            await suspect(pond, queue, "waits")
    async with working(pond, child_command=[sys.executable, "-c", WAITING_CHILD]):
        assert pond.worker is not None
        loops = pond.worker._suspect_loops
        await until(lambda: [sum(child.started for child in loop._running.values()) for loop in loops] == [each] * 2)
        for queue in ("a", "b"):
            assert await counts(pond, queue) == {State.PROCESSING: each, State.PENDING: 3 - each}
        (tmp_path / "released").touch()
        for queue in ("a", "b"):
            assert await drained(pond, queue) == {State.COMPLETED: 3}


@on("sqlite")
async def test_an_unknown_error_of_a_claim_does_not_end_the_worker(
    pond: Millpond, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that of a suspect nor that of other messages."""
    transport: Any = await pond.transport
    real, kinds = transport.claim, []

    async def claim(*args: Any, **options: Any) -> list[Any]:
        kinds.append(options.get("others", True))
        if kinds.count(kinds[-1]) == 1:
            raise TypeError("'>=' not supported")
        return list(await real(*args, **options))

    monkeypatch.setattr(transport, "claim", claim)

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    id_ = await pond.publish("q", 1)
    async with working(pond, child_command=[sys.executable, "-c", CHILD]):
        await became(pond, id_, State.COMPLETED)
        await until(lambda: kinds.count(False) > 1)
    assert caplog.text.count("TypeError: '>=' not supported") == 2
