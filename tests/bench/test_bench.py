"""The measurements run, in their smallest form. How fast anything is, `make bench` says, and no test."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from bench import rabbitmq
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
    # Peers are installed for their measurements, which takes minutes.
    return pytest.param(scenario, marks=[pytest.mark.long, pytest.mark.timeout(600)] if scenario.peers else [])


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


async def test_the_broker_is_measured(rabbitmq_url: str) -> None:
    found = await rabbitmq.measure(rabbitmq_url, 200, 1, None)
    assert [m.name for m in found] == ["rabbitmq-publish", "rabbitmq-drain"]
    assert all(m.value > 0 and min(m.per_second.values()) > 0 for m in found)


async def test_a_contest_is_timed(postgres_url: str) -> None:
    """What peers do too, by Millpond alone"""
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

    console = Console(record=True, width=160)
    print_table(console, found)
    assert "0.50" in console.export_text()
