"""A key range moves to another shard while the pond is in use: nothing is lost or doubled, wherever the mover stops."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import millpond
from millpond import Ack, ManualClock, Nack, State, transports
from millpond.errors import InvalidOption, MoverFenced, ShardMapMismatch
from millpond.seam.shards import MapChange, MoveProgress
from millpond.seam.workers import message_step
from millpond.transports.database.moves.move_steps import DatabaseMoving
from millpond.transports.database.sql.statement import Query, Steps
from millpond.transports.database.store import DatabaseStore
from millpond.transports.key_range import KeyRange
from millpond.transports.shard_map import ShardMap
from millpond.transports.sharded import mover
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover
from millpond.transports.sharded.store import ShardedStore
from millpond.transports.url import Url
from tests import templates
from tests.rooms.streams.driver import Driver
from tests.shards.conftest import keys_of, message
from tests.shared import empty_databases
from tests.triggers import execute, id_literal
from tests.waiting import until

STEPS = (
    *("begin", "fence", "copy dedupe", "await ids", "switch source", "add settings", "copy schedules"),
    *("switch target", "drop schedules", "switch other", "copy", "remove", "activate", "end"),
)
REPEATED = ("fence", "copy dedupe", "await ids", "copy", "remove", "activate")
KILLING = ("moves", "moving_ids", "moving_unique", "moving_periodic", "sweep", "restored_shard")
"""Tests that kill movers."""
FIRST = MapChange("-55", "a", "b")
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("patient")]


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def urls(request: pytest.FixtureRequest, tmp_path: Any) -> list[str]:
    """Two databases of one kind, and a file."""
    if request.param == "sqlite":
        return [templates.migrated(tmp_path / f"{name}.db") for name in "abc"]
    return [*empty_databases(request, request.param, 2), templates.migrated(tmp_path / "c.db")]


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[ShardedStore]:
    await transports.init_shards(urls, names=["a", "b", "c"])
    found = await millpond.connect(urls)
    assert isinstance(found, ShardedStore)
    yield found
    await found.close()


class Killed(BaseException):
    """The mover ends here, as after kill -9: nothing is cleaned up."""


async def run(
    urls: list[str],
    kill: tuple[str, int] | None = None,
    asleep: asyncio.Event | None = None,
    wake: asyncio.Event | None = None,
    change: MapChange = FIRST,
) -> int:
    """Move a range. `kill`: die before a step, at its given occurrence, or with `asleep` sleep there."""
    seen: Counter[str] = Counter()

    async def on_step(step: str) -> None:
        seen[step] += 1
        if kill == (step, seen[step]):
            if asleep is None or wake is None:
                raise Killed(step)
            asleep.set()
            await wake.wait()

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        pending = (await stores["a"].moving.pending()).change
        return await Mover(stores, map_, on_step=on_step).run(pending or change)


async def connect_one(url: Url, **options: Any) -> DatabaseStore:
    found = await millpond.connect(url.raw, **options)
    assert isinstance(found, DatabaseStore)
    return found


async def bodies(store: ShardedStore) -> Counter[bytes]:
    """Claim and ack everything; the number of deliveries of each body."""
    found: Counter[bytes] = Counter()
    while claims := await store.claim(["q"], 500):
        found.update(claim.message.payload for claim in claims)
        await store.settle([Ack(claim.receipt) for claim in claims])
    return found


async def live(store: ShardedStore, shard: str) -> int:
    rows = await store.members[shard].call(lambda one: one.operations.browse("q", limit=5000))
    return sum(row.state.value in ("PENDING", "RETRYABLE", "PROCESSING") for row in rows)


async def test_waiting_and_scheduled_messages_move(urls: list[str], store: ShardedStore) -> None:
    keys = keys_of(store, "a", 30)
    await store.publish([message(key, key.encode(), headers={"n": 1}, priority=7) for key in keys])
    await store.publish([message(keys[0], b"later", delay=3600)])
    (nacked, *others) = await store.claim(["q"], 30)
    await store.settle([Nack(nacked.receipt, delay=0, error="first try"), *(Ack(one.receipt) for one in others[:9])])
    await store.settle([Nack(one.receipt, delay=0) for one in others[9:]])
    progress: list[MoveProgress] = []
    (done,) = await transports.move_range(urls, "-55", "b", on_progress=progress.append)
    assert done.moved == 22
    assert {one.step for one in progress} >= {"fence", "switch", "move", "done"}
    assert (await live(store, "a"), await live(store, "b")) == (0, 22)
    (row,) = await store.operations.find(nacked.message.id)
    assert (row.attempts, row.deliveries, row.error, row.priority) == (1, 1, "first try", 7)
    assert dict(row.headers) == {"n": 1}
    await store.publish([message(keys[0], b"new")])
    assert store.members.map.ranges == (("-aa", "b"), ("aa-", "c"))
    found = await bodies(store)
    assert len(found) == 22 and set(found.values()) == {1}
    assert await transports.move_range(urls, "-55", "b") == []


@pytest.mark.slow_on_servers
@pytest.mark.parametrize("set_back", [False, True])
async def test_a_claimed_message_of_a_shard_whose_clock_is_ahead_is_waited_for(
    urls: list[str], store: ShardedStore, set_back: bool
) -> None:
    """It came from there earlier. `set_back`: that clock was corrected since."""
    ahead = ManualClock(datetime.now(UTC) + timedelta(minutes=1))

    async def move(change: MapChange, *, in_pass: Callable[[int], Awaitable[None]], corrected: bool = False) -> int:
        passes = 0

        async def on_step(step: str) -> None:
            nonlocal passes
            passes += step == "await ids"
            await in_pass(passes)

        async def connect(url: Url, **options: Any) -> DatabaseStore:
            return await connect_one(url, **({} if corrected or url.raw != urls[2] else {"clock": ahead}))

        async with opened([Url(url) for url in urls], connect, {}) as (stores, map_):
            return await Mover(stores, map_, on_step=on_step).run(change)

    async def nothing(_: int) -> None: ...

    early = await millpond.connect(urls, clock=ahead)
    given = message(*keys_of(store, "c", 1), id=uuid4())
    await early.publish([given])
    assert await move(MapChange("aa-", "c", "a"), in_pass=nothing) == 1
    (claim,) = await early.claim(["q"])
    assert claim.message.id == given.id
    await early.close()
    nacked = False

    async def nack(passes: int) -> None:
        nonlocal nacked
        if passes == 3 and not nacked:
            nacked = True
            await store.settle([Nack(claim.receipt, delay=0)])

    assert await move(MapChange("aa-", "a", "b"), in_pass=nack, corrected=set_back) == 1
    assert (await live(store, "a"), await live(store, "b")) == (0, 1)
    assert not (await store.publish([given]))[0].new


@pytest.mark.parametrize(
    ("urls", "bad", "name"),
    [("mariadb", "x'EDA080'", "`key`"), ("sqlite", "CAST(x'EDA080' AS TEXT)", "key")],
    indirect=["urls"],
)
async def test_a_text_that_the_driver_cannot_decode_moves(
    urls: list[str], store: ShardedStore, bad: str, name: str
) -> None:
    """Half of a surrogate pair, which MariaDB takes for UTF-8."""
    keys = keys_of(store, "a", 20)
    await store.publish([message(keys[0])])
    await bodies(store)
    published = await store.publish([message(key, key.encode()) for key in keys])
    execute(
        urls[0],
        f"UPDATE millpond_archive SET {name} = {bad}, created_at = 0",
        f"UPDATE millpond_message SET headers = {bad} WHERE id = {id_literal(urls[0], published[0].id)}",
        f"UPDATE millpond_message SET {name} = {bad} WHERE id = {id_literal(urls[0], published[1].id)}",
        f"INSERT INTO millpond_once (id, {name}, token, at) "
        f"VALUES ({id_literal(urls[0], published[2].id)}, {bad}, 1, 1)",
    )
    await transports.move_range(urls, "-", "b")
    assert (await live(store, "a"), await live(store, "b")) == (0, 20)
    await transports.sweep_shards(urls)
    rows = {row.id: row for row in await store.members["b"].call(lambda one: one.operations.browse("q", limit=50))}
    assert rows[published[0].id].headers == {"undecodable": "\\xed\\xa0\\x80"}
    assert rows[published[1].id].key == "\\xed\\xa0\\x80"


@pytest.mark.parametrize("urls", ["sqlite"], indirect=True)
async def test_a_body_that_is_a_number_moves(urls: list[str], store: ShardedStore) -> None:
    """Another program can write it into SQLite."""
    await store.publish([message(*keys_of(store, "a", 1))])
    execute(urls[0], "UPDATE millpond_message SET payload = 75")
    await transports.move_range(urls, "-55", "b")
    assert await bodies(store) == {b"75": 1}


async def test_a_given_id_is_recognised_by_the_new_owner(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "a", 1)
    handled, waiting = uuid4(), uuid4()
    await store.publish([message(key, id=handled)])
    await bodies(store)
    await store.publish([message(key, id=waiting)])
    await run(urls)
    again = await store.publish([message(key, id=handled), message(key, id=waiting)])
    assert [one.new for one in again] == [False, False]
    assert sum((await bodies(store)).values()) == 1


async def test_the_results_of_steps_move_along(urls: list[str], store: ShardedStore) -> None:
    (key,) = keys_of(store, "a", 1)
    await store.publish([message(key)])
    (claim,) = await store.claim(["q"])
    step = message_step(claim.message.id, "charge")
    assert (await store.workers.begin_step(claim.receipt, step)).state == "owned"
    assert await store.workers.finish_step(claim.receipt, step, b"paid")
    await store.settle([Nack(claim.receipt, delay=0)])
    await run(urls)
    (again,) = await store.claim(["q"])
    assert again.receipt.shard == "b"
    assert (await store.workers.begin_step(again.receipt, step)).result == b"paid"


async def test_the_result_of_a_step_comes_back_with_the_range(urls: list[str], store: ShardedStore) -> None:
    """It began at the first owner, without a result, and was finished at the other one."""
    await store.publish([message(*keys_of(store, "a", 1))])
    for shard, change in (("a", FIRST), ("b", MapChange("-55", "b", "a"))):
        (claim,) = await store.claim(["q"])
        assert claim.receipt.shard == shard
        step = message_step(claim.message.id, "charge")
        assert (await store.workers.begin_step(claim.receipt, step)).state == "owned"
        if shard == "b":
            assert await store.workers.finish_step(claim.receipt, step, b"paid")
        await store.settle([Nack(claim.receipt, delay=0)])
        await run(urls, change=change)
    (again,) = await store.claim(["q"])
    assert again.receipt.shard == "a"
    assert (await store.workers.begin_step(again.receipt, step)).result == b"paid"


async def test_claimed_messages_are_waited_for_and_shown(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "a", 2)])
    (claim, other) = await store.claim(["q"], 2)
    shown = asyncio.Event()

    def on_progress(progress: MoveProgress) -> None:
        if progress.step == "move" and progress.claimed == 2:
            shown.set()

    moving = asyncio.ensure_future(transports.move_range(urls, "-55", "b", on_progress=on_progress))
    await shown.wait()
    assert await store.settle([Ack(claim.receipt), Nack(other.receipt, delay=0)]) == []
    ((done,)) = await moving
    assert done.moved == 1
    assert sum((await bodies(store)).values()) == 1


async def test_claims_that_end_while_no_worker_runs_move_too(urls: list[str], store: ShardedStore) -> None:
    """That of a process which ended, and that of a worker which died: nobody else would give their messages back."""
    keys = keys_of(store, "a", 2)
    await store.publish([message(key, key.encode()) for key in keys])
    assert len(await store.claim(["q"], 1, lease=0.1)) == 1
    inner = await millpond.connect(urls[0])
    await inner.workers.join()
    assert len(await inner.claim(["q"], 1, lease=0.1, by_worker=True)) == 1
    # No beat holds this claim from now on.
    assert await run(urls) == 2
    assert await bodies(store) == Counter(key.encode() for key in keys)
    await inner.close()


async def test_the_open_batch_of_a_stream_is_waited_for_and_shown(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "a", 5)])
    inner = store.members["a"].store
    assert inner is not None
    driver = await Driver(inner).open()
    batch = await driver.held(1, limit=3)
    shown = asyncio.Event()

    def on_progress(progress: MoveProgress) -> None:
        if progress.step == "move" and (progress.moved, progress.claimed) == (2, 3):
            shown.set()

    moving = asyncio.ensure_future(transports.move_range(urls, "-55", "b", on_progress=on_progress))
    await shown.wait()
    assert not moving.done() and await driver.held(1) == batch, "the same batch, after the others have moved"
    await driver.ack(1)
    (done,) = await moving
    assert done.moved == 2
    assert sum((await bodies(store)).values()) == 2
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == 5


async def test_the_messages_of_a_released_stream_move(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "a", 3)])
    inner = store.members["a"].store
    assert inner is not None
    await (await Driver(inner).open()).held(1)
    shown = asyncio.Event()
    moving = asyncio.ensure_future(
        transports.move_range(urls, "-55", "b", on_progress=lambda one: shown.set() if one.claimed == 3 else None)
    )
    await shown.wait()
    await inner.streams.release("s")
    (done,) = await moving
    assert done.moved == 3
    assert sum((await bodies(store)).values()) == 3


@pytest.mark.slow_on_servers
@pytest.mark.parametrize(("step", "occurrence"), [*((step, 1) for step in STEPS), *((step, 2) for step in REPEATED)])
async def test_a_mover_that_is_killed_is_continued(
    urls: list[str], store: ShardedStore, step: str, occurrence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mover", "dedupe_copy", "known_ids"):
        monkeypatch.setattr(f"millpond.transports.sharded.{module}.BATCH", 10)
    keys = keys_of(store, "a", 25)
    given = [uuid4() for _ in keys]
    await store.publish([message(key, key.encode(), id=id_) for key, id_ in zip(keys, given, strict=True)])
    with pytest.raises(Killed):
        await run(urls, (step, occurrence))
    early = [one.message.payload for one in await claim_and_ack(store, 4)]
    published = asyncio.ensure_future(store.publish([message(keys[0], b"new")]))
    await run(urls)
    await published
    found = await bodies(store)
    assert sorted([*early, *found.elements()]) == sorted([b"new", *(key.encode() for key in keys)])
    assert not [one.new for one in await store.publish([message(keys[3], id=given[3])]) if one.new]
    assert await live(store, "a") == 0


@pytest.mark.slow_on_servers
@pytest.mark.parametrize("step", ["fence", "collect", "switch source", "copy", "remove", "activate", "end"])
async def test_a_second_mover_is_killed_too(urls: list[str], store: ShardedStore, step: str) -> None:
    keys = keys_of(store, "a", 20)
    await store.publish([message(key, key.encode()) for key in keys])
    first = "remove" if step == "copy" else "copy" if step in ("remove", "activate") else "activate"
    for kill in (first, step):
        with pytest.raises(Killed):
            await run(urls, (kill, 1))
    await run(urls)
    assert await bodies(store) == Counter(key.encode() for key in keys)


def test_a_mover_is_killed_before_every_step() -> None:
    """A new step of a mover is added to one of these tests."""
    folder = Path(mover.__file__).parent
    named = {step for file in folder.glob("*.py") for step in re.findall(r'_on_step\("([^"]+)"\)', file.read_text())}
    tests = "".join(Path(__file__).with_name(f"test_{name}.py").read_text() for name in KILLING)
    assert [step for step in sorted(named) if f'"{step}"' not in tests] == []


async def claim_and_ack(store: ShardedStore, limit: int) -> list[Any]:
    claims = await store.claim(["q"], limit)
    await store.settle([Ack(claim.receipt) for claim in claims])
    return claims


async def test_ids_stay_known_that_are_published_while_their_rows_are_copied(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no shard accepts the range, only the new rows are read, also those of a shorter window."""
    monkeypatch.setattr("millpond.transports.sharded.dedupe_copy.PAGE", 20)
    key, read, real = keys_of(store, "a", 1)[0], [0], DatabaseMoving.dedupe_page
    short: Any = await millpond.connect(urls, dedupe_for=3600)

    async def some(handle: ShardedStore, count: int) -> list[UUID]:
        ids = [uuid4() for _ in range(count)]
        for id_ in ids:
            await handle.publish([message(key, id=id_)])
        return ids

    async def counting(self: DatabaseMoving, *args: Any) -> Any:
        rows = await real(self, *args)
        read[0] += len(rows)
        return rows

    monkeypatch.setattr(DatabaseMoving, "dedupe_page", counting)
    ids = [*await some(store, 150), *await some(short, 50)]
    late: list[UUID] = []

    async def on_step(step: str) -> None:
        if step == "switch source":
            assert read[0] == 200
            late.extend([*await some(store, 3), *await some(short, 3)])
            read[0] = 0
        elif step == "switch target":
            assert 6 <= read[0] <= 50

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        await Mover(stores, map_, on_step=on_step).run(FIRST)
    assert len(late) == 6
    again = await store.publish([message(key, id=id_) for id_ in (*ids, *late)])
    assert not any(one.new for one in again)
    assert await live(store, "b") == 206
    await short.close()


async def test_copies_that_must_wait_hold_up_no_others(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ids were taken at the new owner, with other keys, after the mover had died."""
    (key,), (other,) = keys_of(store, "a", 1), keys_of(store, "b", 1)
    ids = sorted(uuid4() for _ in range(4))
    await store.publish([message(key, id=id_) for id_ in ids])
    with pytest.raises(Killed):
        await run(urls, ("activate", 1))
    await store.members["b"].call(lambda one: one.runner.write(lambda: forget_dedupe(one)))
    await store.publish([message(other, b"taken", id=id_) for id_ in ids[:2]])
    monkeypatch.setattr("millpond.transports.sharded.mover.BATCH", 2)
    moving = asyncio.ensure_future(run(urls))

    async def visible() -> bool:
        return await live(store, "b") == 4

    await until(visible)
    found: Counter[bytes] = Counter()

    async def handled() -> bool:
        found.update(await bodies(store))
        return sum(found.values()) >= 6

    await until(handled)
    await moving
    assert found == {b"taken": 2, b"x": 4}


def forget_dedupe(store: DatabaseStore) -> Steps[None]:
    yield Query(store.dialect.sql("DELETE FROM {dedupe}"), {})


@pytest.mark.slow_on_servers
@pytest.mark.parametrize("step", ["fence", "switch source", "switch target", "copy", "remove", "activate", "end"])
async def test_a_second_operator_fences_the_first(urls: list[str], store: ShardedStore, step: str) -> None:
    """The first one sleeps before a step, the second one makes the whole change, and the first one wakes up."""
    keys = keys_of(store, "a", 20)
    await store.publish([message(key, key.encode()) for key in keys])
    asleep, wake = asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(run(urls, (step, 1), asleep, wake))
    await asleep.wait()
    await run(urls)
    wake.set()
    with pytest.raises(MoverFenced, match="another operator"):
        await first
    found = await bodies(store)
    assert sorted(found.elements()) == sorted(key.encode() for key in keys)


@pytest.mark.slow_on_servers
async def test_another_change_waits_for_the_pending_one(urls: list[str], store: ShardedStore) -> None:
    with pytest.raises(Killed):
        await run(urls, ("switch source", 1))
    with pytest.raises(ShardMapMismatch, match="move -55 from a to b"):
        await transports.move_range(urls, "aa-", "a")
    aborted = await transports.abort_move(urls)
    assert aborted == MapChange("-55", "a", "b")
    assert await transports.abort_move(urls) is None
    await transports.move_range(urls, "aa-", "a")


@pytest.mark.slow_on_servers
async def test_abort_ends_at_the_point_of_no_return(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "a", 3)])
    with pytest.raises(Killed):
        await run(urls, ("switch target", 1))
    with pytest.raises(ShardMapMismatch, match="point of no return"):
        await transports.abort_move(urls)
    (done,) = await transports.move_range(urls, "-55", "b")
    assert done.moved == 3


@pytest.mark.slow_on_servers
async def test_a_dry_run_changes_nothing(urls: list[str], store: ShardedStore) -> None:
    await store.publish([message(key) for key in keys_of(store, "a", 5)])
    (part,) = await transports.move_range(urls, "a", "c", dry_run=True)
    assert (part.change, part.left, part.moved) == (MapChange("-55", "a", "c"), 5, 0)
    assert await live(store, "a") == 5
    with pytest.raises(InvalidOption, match="no shard 'z'"):
        await transports.move_range(urls, "-55", "z", dry_run=True)


@pytest.mark.slow_on_servers
async def test_a_part_of_a_range_moves_and_comes_back(urls: list[str], store: ShardedStore) -> None:
    keys = keys_of(store, "a", 40)
    await store.publish([message(key, key.encode()) for key in keys])
    await transports.move_range(urls, "20-40", "c")
    assert await live(store, "c") > 0
    await transports.move_range(urls, "20-40", "a")
    assert await live(store, "c") == 0
    assert sorted((await bodies(store)).elements()) == sorted(key.encode() for key in keys)


@pytest.mark.slow_on_servers
async def test_publishers_and_workers_go_on(urls: list[str], store: ShardedStore) -> None:
    """Publishers and workers of all shards run while a range moves to and fro, and movers die at random steps."""
    published: list[bytes] = []
    handled: Counter[bytes] = Counter()
    stop = asyncio.Event()
    other = await millpond.connect(urls)

    async def publishing(number: int) -> None:
        while not stop.is_set():
            batch = [f"{number}-{len(published) + n}-{uuid4().hex[:8]}".encode() for n in range(3)]
            await (store, other)[number % 2].publish([message(body.decode(), body) for body in batch])
            published.extend(batch)

    async def working() -> None:
        while not stop.is_set():
            claims = await other.claim(["q"], 5)
            handled.update(claim.message.payload for claim in claims)
            await other.settle([Ack(claim.receipt) for claim in claims])
            await asyncio.sleep(0.01)

    tasks = [asyncio.ensure_future(one) for one in (*map(publishing, range(4)), working(), working())]
    for source, target, step in (("a", "b", "remove"), ("b", "a", "activate"), ("a", "b", "switch target")):
        with contextlib.suppress(Killed):
            await run(urls, (step, 1), change=MapChange("-55", source, target))
        await asyncio.sleep(0.05)
        await transports.move_range(urls, "-55", target)
    stop.set()
    await asyncio.gather(*tasks)
    await other.close()
    handled.update(await bodies(store))
    assert len(published) > 0
    assert handled == Counter(published)


async def test_a_new_database_joins_the_pond(urls: list[str], store: ShardedStore, tmp_path: Any) -> None:
    keys = keys_of(store, "a", 12)
    await store.publish([message(key, key.encode()) for key in keys])
    more = [*urls, f"sqlite:///{tmp_path / 'd'}.db"]
    map_ = await transports.add_shard(more, "d", migrate=True)
    assert map_.shards == ("a", "b", "c", "d") and map_.ranges_of("d") == []
    assert await transports.add_shard(more, "d") == map_
    await transports.move_range(more, "a", "d")
    with pytest.raises(ShardMapMismatch, match="'d'"):
        await store.publish([message(keys[0])])
    new = await millpond.connect(more)
    assert sorted((await bodies(new)).elements()) == sorted(key.encode() for key in keys)  # type: ignore[arg-type]
    await new.close()


def test_ranges_of_the_next_map() -> None:
    map_ = ShardMap.even("pond", ["a", "b"])
    assert map_.moved(KeyRange.parse("40-c0"), "a").ranges == (("-c0", "a"), ("c0-", "b"))


async def test_large_bodies_are_read_and_written_in_small_parts(
    urls: list[str], store: ShardedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server ends a transaction that is silent for seconds, and the bodies of a whole batch would fill the memory."""
    monkeypatch.setattr(mover, "BATCH_BYTES", 100_000)
    keys = keys_of(store, "a", 100)
    small, large = b"s", b"l" * 30_000
    await store.publish([message(key, large if n % 2 else small) for n, key in enumerate(keys)])
    read: list[int] = []
    written: list[int] = []
    waiting, copy = DatabaseMoving.waiting, DatabaseMoving.copy

    async def reading(self: DatabaseMoving, ids: Any) -> Any:
        found = await waiting(self, ids)
        read.append(sum(len(row[mover._BODY]) for row in found[0]))
        return found

    async def writing(self: DatabaseMoving, epoch: int, source: str, rows: Any, *more: Any) -> Any:
        written.append(sum(len(row[mover._BODY]) for row in rows))
        return await copy(self, epoch, source, rows, *more)

    monkeypatch.setattr(DatabaseMoving, "waiting", reading)
    monkeypatch.setattr(DatabaseMoving, "copy", writing)
    assert await run(urls) == 100
    assert max(written) <= 100_000
    assert max(read[1:]) <= 400_000, "only the first part is read before the size of bodies is known"
    assert await bodies(store) == {small: 50, large: 50}
