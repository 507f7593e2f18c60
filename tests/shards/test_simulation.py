"""A worker on simulated shards: in virtual time, with the same results on every machine."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from bench import virtual_time
from bench.simulation import Load, Pond, Throughput, compare, in_trouble, publish_and_drain, simulate, work
from bench.stand_in import Costs, Line, Times
from millpond import Message
from millpond.clock import monotonic
from millpond.transports.sharded import breaker

COSTS: Costs = {
    "publish": Line(Times(0.0003, 0.0006, 0.001), Times(0.00006, 0.0001, 0)),
    "claim": Line(Times(0.0003, 0.0006, 0.001), Times(0.00008, 0.0002, 0)),
    "settle": Line(Times(0.0003, 0.0006, 0.001), Times(0.0001, 0.0002, 0)),
}
SLOTS = 100


@pytest.fixture(scope="module")
def four() -> Throughput:
    return simulate(COSTS, 4, slots=SLOTS, seconds=3)


@pytest.mark.parametrize("trouble", ["dead", "silent", "slow", "hot"])
def test_one_shard_in_trouble_takes_nothing_from_the_others(trouble: str, four: Throughput) -> None:
    # A silence is noticed after 5 seconds.
    found, share = in_trouble(COSTS, 4, trouble, four, slots=SLOTS, seconds=8 if trouble == "silent" else 3)
    assert share >= 0.95
    if trouble in ("dead", "silent"):
        assert found.first == 0
    elif trouble == "slow":
        assert 0 < found.first < four.first
    else:
        assert found.first > found.others / 3


def test_a_run_can_be_repeated(four: Throughput) -> None:
    assert simulate(COSTS, 4, slots=SLOTS, seconds=3) == four


def test_a_worker_needs_no_more_claims_on_256_shards_than_on_16() -> None:
    some, many = (simulate(COSTS, shards, seconds=3, slots=SLOTS) for shards in (16, 256))
    assert many.statements <= 1.1 * some.statements
    assert many.all >= 0.9 * some.all
    dead, share = in_trouble(COSTS, 256, "dead", many, seconds=3, slots=SLOTS)
    assert dead.first == 0 and many.first > 0
    assert share >= 0.95


def test_each_message_is_handled_once_while_a_shard_comes_and_goes() -> None:
    load = 2_000

    async def main() -> tuple[int, list[int], float]:
        pond = Pond(COSTS, 3, cores=2, one_machine=False)
        for database in pond.databases.values():
            database.backlog = load
        store = await pond.open()
        working = asyncio.create_task(work(store, SLOTS, 3 * load))
        first = pond.first
        await asyncio.sleep(0.5)
        first.silent = True
        await asyncio.sleep(0.5)
        first.silent, first.refuses = False, True
        await asyncio.sleep(8)
        handled_by_others = [one.handled for one in pond.others]
        assert store.missing_shards == ("s0",)
        first.refuses = False
        await working
        took = asyncio.get_running_loop().time()
        await store.close()
        assert not any(one.unsettled or one.returned for one in pond.databases.values())
        return first.handled, handled_by_others, took

    handled, by_others, took = virtual_time.run(main)
    assert handled == load and by_others == [load, load]
    assert took < 30


def test_messages_are_routed_to_their_shards() -> None:
    async def main() -> dict[str, int]:
        pond = Pond(COSTS, 4, cores=2, one_machine=True)
        store = await pond.open()
        await store.publish([Message(queue="orders", payload=b"x", key=f"key-{n}") for n in range(400)])
        await store.close()
        return {one.record.name: one.waiting for one in pond.databases.values()}

    waiting = virtual_time.run(main)  # a stand-in refuses a message that belongs to another shard
    assert sum(waiting.values()) == 400
    assert min(waiting.values()) > 50


def test_the_program_and_the_databases_share_the_cores_of_one_machine() -> None:
    load = Load(messages=1_000, call=200, slots=SLOTS)

    async def main(cores: int) -> dict[str, float]:
        store = await Pond(COSTS, 4, cores=cores, one_machine=True).open()
        found = await publish_and_drain(store, load)
        await store.close()
        return found

    one, two = (virtual_time.run(partial(main, cores)) for cores in (1, 2))
    # A message takes 0.58 ms of processor time to be claimed and acked.
    assert one["drain"] < 1 / 0.00058 < two["drain"] < 2 / 0.00058


def test_a_comparison_names_what_differs() -> None:
    load = Load(messages=400, call=100, slots=SLOTS)
    rates = {(shards, verb): 1_000.0 for shards in (1, 2, 4) for verb in ("publish", "drain")}
    found = compare(COSTS, rates, load)
    assert [(one.shards, one.verb) for one in found] == list(rates)
    assert all(one.ratio == one.simulated / 1_000 for one in found)


def test_virtual_time_passes_only_by_waiting() -> None:
    async def main() -> tuple[float, float]:
        began, real = vars(breaker)["monotonic"](), time.monotonic()
        await asyncio.sleep(3_600)
        assert time.monotonic() - real < 60
        return began, vars(breaker)["monotonic"]()

    assert virtual_time.run(main) == (0, 3_600)
    assert vars(breaker)["monotonic"] is monotonic


def test_a_wait_without_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer will wake one"):
        virtual_time.run(main)
