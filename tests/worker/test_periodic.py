"""`@pond.every`: declared in a program, published by its workers, changed by the command."""

import json
from datetime import timedelta

import pytest

from millpond import Millpond, Subscribers
from millpond.cli import run_command
from millpond.errors import Closed, InvalidOption, StoreBusy
from millpond.worker import chores
from tests.waiting import until
from tests.worker.conftest import on, working


async def test_a_test_advances_the_clock_and_the_handler_runs() -> None:
    pond, ran = Millpond("memory://"), []

    @pond.every("*/5 * * * *", queue="reports", timezone="Europe/Berlin", max_workers=1)
    async def report() -> None:
        ran.append("report")

    @pond.every(every=timedelta(hours=1), queue="cleanup", body={"days": 7}, missed="all", name="hourly cleanup")
    def clean(body: dict, headers: dict) -> None:
        ran.append((body["days"], headers["periodic"]))

    async with pond.testing() as test:
        assert await test.run() == 0
        test.advance(300)
        assert await test.run() == 1
        test.advance(timedelta(hours=2))
        assert await test.run() == 3
    assert sorted(map(str, ran)) == ["(7, 'hourly cleanup')", "(7, 'hourly cleanup')", "report", "report"]


async def test_a_run_until_idle_catches_all_up() -> None:
    """Several transactions publish so many times."""
    pond, ran = Millpond("memory://"), []

    @pond.every(every=1, queue="behind", missed="all", max_workers=100)
    async def catch_up() -> None:
        ran.append("behind")

    async with pond.testing() as test:
        assert await test.run() == 0
        test.advance(2500)
        await test.run()
    assert len(ran) == 2500


@on("sqlite")
async def test_workers_publish_and_the_command_changes(
    pond: Millpond, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    ran: list[int] = []

    @pond.every(every=1, queue="ticks")
    async def tick() -> None:
        ran.append(1)

    async def command(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(run_command, ["periodic", *arguments, "--url", url])
        return code, capsys.readouterr().out

    async with working(pond):
        await until(lambda: len(ran) >= 2)
        out = (await command("--json"))[1]
        (facts,) = json.loads(out)["periodic"]
        assert (facts["name"], facts["schedule"], facts["paused"]) == ("ticks", "every 1", False)
        assert (await command("pause", "ticks"))[0] == 0
    assert "paused" in (await command())[1]
    assert (await command("set", "ticks", "--schedule", "0 3 * * *", "--timezone", "Europe/Berlin"))[0] == 0
    assert (await command("resume", "ticks"))[0] == 0
    out = (await command())[1]
    assert "0 3 * * *" in out and "Europe/Berlin" in out
    assert (await command("set", "ticks", "--schedule", "61 * * * *"))[0] == 2
    assert (await command("set", "ticks"))[0] == 2
    assert (await command("pause", "ticks", "--schedule", "x"))[0] == 2
    assert (await command("pause"))[0] == 2
    assert (await command("pause", "nothing"))[0] == 1
    assert (await command("remove", "ticks"))[0] == 0
    assert "no periodic messages" in (await command())[1]


async def test_another_module_declares_and_the_pond_includes() -> None:
    module, pond, ran = Subscribers(), Millpond("memory://"), []

    @module.every(every=60, queue="ticks", body=7)
    async def tick(body: int) -> None:
        ran.append(body)

    pond.include(module)
    async with pond.testing() as test:
        await test.run()
        test.advance(60)
        assert await test.run() == 1
        await tick.publish(8)
        assert await test.run() == 1
    assert ran == [7, 8]
    with pytest.raises(InvalidOption, match="another name"):
        module.every(every=60, queue="ticks")
    other = Subscribers()
    other.every(every=60, queue="others", name="ticks")
    with pytest.raises(InvalidOption, match="another name"):
        pond.include(other)


def test_wrong_declarations_raise_at_their_line() -> None:
    pond = Millpond("memory://")
    for wrong in ({}, {"schedule": "* * * * *", "every": 5}, {"schedule": "* *"}, {"every": 0.1}):
        with pytest.raises(InvalidOption):
            pond.every(**wrong, queue="q")
    pond.every("* * * * *", queue="q")
    with pytest.raises(InvalidOption, match="another name"):
        pond.every("* * * * *", queue="q")


async def test_after_an_error_the_loop_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the call before found a message that was due at once."""
    results, pauses = iter([0.0, StoreBusy("locked"), ValueError("bug"), None, Closed("end")]), []

    class Room:
        async def publish_due(self) -> float | None:
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("millpond.worker.chores.asyncio.sleep", sleep)
    await chores.periodic_loop(Room())  # type: ignore[arg-type]
    assert pauses == [0.01, 1.0, 1.0, chores.READ_EVERY]
