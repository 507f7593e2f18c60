"""The measurements run, in their smallest form. Only `make bench` measures speed."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import rabbitmq, simulation
from bench.__main__ import measure
from bench.contestants import MILLPOND, contest
from bench.databases import MariadbDatabase, PostgresDatabase, SqliteDatabase
from bench.measure import Measurement, ratio, take_turns
from bench.report import marks, print_table, write_json, write_markdown
from bench.scenario import Scenario
from bench.scenarios import SCENARIOS
from bench.sizes import TINY
from servers import MariaDB, Postgres


def marked(scenario: Scenario) -> object:
    """Peers are installed for their measurements; that takes minutes. A kind of measurement is the same on each
    database, except for the work by hand and the filling of tables."""
    first = next(one for one in SCENARIOS if one.kind == scenario.kind)
    again = scenario is not first and scenario.kind not in ("publish", "drain")
    return pytest.param(scenario, marks=[pytest.mark.long, pytest.mark.timeout(600)] if scenario.peers or again else [])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [marked(s) for s in SCENARIOS], ids=[s.name for s in SCENARIOS])
async def test_every_measurement_runs(scenario: Scenario, postgres_server: Postgres, mariadb_server: MariaDB) -> None:
    databases = {
        "postgres": lambda: PostgresDatabase(postgres_server),
        "mariadb": lambda: MariadbDatabase(mariadb_server),
        "sqlite": SqliteDatabase,
    }
    found = await measure([scenario], TINY, databases)
    assert found
    for measurement in found:
        assert measurement.name.startswith(scenario.name)
        assert math.isfinite(measurement.value)
        if measurement.unit == "ratio":
            assert measurement.low > 0
            assert all(rate > 0 for rate in measurement.per_second.values())
        assert "driver" in measurement.facts


@pytest.mark.slow
async def test_a_simulation_is_compared(postgres_server: Postgres) -> None:
    load = simulation.Load(messages=400, call=100, slots=50, sizes=(10, 40), rounds=1)
    costs, rates = await simulation.measure(PostgresDatabase(postgres_server), load)
    assert {"publish", "claim", "settle"} == set(costs)
    # In another thread: virtual time has its own event loop.
    found = await asyncio.to_thread(simulation.compare, costs, rates, load)
    assert [one.shards for one in found] == [1, 1, 2, 2, 4, 4]
    assert all(one.ratio > 0 and math.isfinite(one.ratio) for one in found)


@pytest.mark.slow
async def test_the_broker_is_measured(rabbitmq_url: str) -> None:
    found = await rabbitmq.measure(rabbitmq_url, 200, 1, None)
    assert [m.name for m in found] == ["rabbitmq-publish", "rabbitmq-drain"]
    assert all(m.value > 0 and min(m.per_second.values()) > 0 for m in found)


@pytest.mark.slow
async def test_a_contest_is_timed(postgres_url: str) -> None:
    """Scenarios with peers, here with Millpond alone."""
    drain = await contest(MILLPOND, "drain", 100, postgres_url)
    assert drain["count"] == 100 and drain["seconds"] > 0
    latency = await contest(MILLPOND, "latency", 5, postgres_url)
    assert len(latency["latencies"]) == 5 and all(seconds > 0 for seconds in latency["latencies"])


async def test_both_sides_take_turns_in_going_first() -> None:
    order: list[str] = []

    def work(name: str, seconds: float) -> object:
        async def run() -> float:
            order.append(name)
            return seconds

        return run

    seconds = await take_turns({"ours": work("ours", 2.0), "raw": work("raw", 1.0)}, 3)  # type: ignore[dict-item]
    assert order == ["ours", "raw", "raw", "ours", "ours", "raw"]
    assert seconds == {"ours": [2.0] * 3, "raw": [1.0] * 3}


def a_ratio(at_least: float | None) -> Measurement:
    return ratio("a-drain", "drain", "raw SQL", [2.0, 2.0, 4.0], [1.0, 1.5, 1.0], 100, at_least=at_least)


def test_the_median_of_the_rounds_counts() -> None:
    measurement = a_ratio(0.5)
    assert (measurement.low, measurement.value, measurement.high) == (0.25, 0.5, 0.75)
    assert measurement.per_second == {"ours": 50.0, "theirs": 100.0}
    assert measurement.met is True
    assert a_ratio(0.51).met is False
    assert a_ratio(None).met is None


def test_what_is_reported(tmp_path: Path) -> None:
    found = [a_ratio(0.5).with_facts({"python": "3"}), a_ratio(0.9)]
    write_json(tmp_path / "new folder" / "bench.jsonl", found)
    lines = [json.loads(line) for line in (tmp_path / "new folder" / "bench.jsonl").read_text().splitlines()]
    assert [(line["name"], line["value"], line["met"]) for line in lines] == [
        ("a-drain", 0.5, True),
        ("a-drain", 0.5, False),
    ]
    assert lines[0]["facts"]["python"] == "3"

    document = tmp_path / "performance.md"
    begin, end = marks()
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for _ in range(2):
        write_markdown(document, found, ["a fact"])
    text = document.read_text()
    assert text.startswith(f"before\n{begin}\n|") and text.endswith(f"{end}\nafter\n")
    assert "old" not in text and text.count("| a-drain |") == 2 and "- a fact" in text

    write_markdown(document, [replace(found[0], name="b-drain", value=0.7)], ["another fact"], others=True)
    text = document.read_text()
    assert "| a-drain |" in text and text.count("| b-drain |") == 1 and "- a fact" in text and "another" not in text
    assert text.count("| measurement |") == 1

    console = Console(record=True, width=160)
    print_table(console, found)
    assert "0.50" in console.export_text()
