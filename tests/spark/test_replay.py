"""A replay publishes the selected messages once each, also after a crash at any point."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import millpond
from millpond import Message, Reject
from millpond.cli import run_command
from millpond.errors import InvalidOption, InvalidQueue
from millpond.message import BODY_LIMIT, replayed_id
from millpond.spark import replay as replaying
from millpond.spark.lake import export
from millpond.spark.replay import Replayed
from millpond.spark.report import report_on
from servers import SparkCluster
from tests.spark.ponds import HOSTILE, fill, password, rows
from tests.spark.write.test_sink import left

pytestmark = pytest.mark.slow

FAILED = "state = 'FAILED'"


@pytest.fixture(params=["postgres_url", "mariadb_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A database of each kind, with live and archived messages."""
    url: str = request.getfixturevalue(request.param)
    fill(url)
    return url


@pytest.fixture
def sqlite(sqlite_url: str) -> str:
    fill(sqlite_url)
    return sqlite_url


def replay(spark: Any, url: str, where: str = FAILED, name: str = "fix", **options: Any) -> Replayed:
    database = {"url": url}
    return replaying.replay(
        replaying.selected(spark, where, database=database), name=name, database=database, **options
    )


def failed(*urls: str) -> dict[UUID, Any]:
    return {id_: row for url in urls for id_, row in rows(url, "archive").items() if row.state == "FAILED"}


def replayed(*urls: str) -> dict[UUID, Any]:
    """Its live messages, by the ids of the originals."""
    found = [row for url in urls for row in rows(url, "messages").values() if "replay-of" in row.headers]
    by_original = {UUID(row.headers["replay-of"]): row for row in found}
    assert len(by_original) == len(found), "each once"
    return by_original


def test_as_they_were_under_new_ids(spark: Any, url: str) -> None:
    before = failed(url)
    assert replay(spark, url) == Replayed(len(before), len(before))
    again = replayed(url)
    assert again.keys() == before.keys() and len(again) == 2 * len(HOSTILE)
    for original, row in again.items():
        old = before[original]
        assert row.id == replayed_id(original, "fix")
        assert (row.queue, row.key, row.priority, row.payload) == (old.queue, old.key, old.priority, old.payload)
        assert row.headers == {**old.headers, "replay-of": str(original)}
        assert (row.state, row.deliveries, row.attempts) == ("PENDING", 0, 0)
    assert failed(url).keys() == before.keys(), "the archive stays as it was"
    assert left(url) == 0
    # Under the same name nothing more is published, by either kind of replay; under another name it is.
    assert replay(spark, url) == Replayed(len(before), 0)
    assert _by_store(url, list(before)) == []
    assert replay(spark, url, f"{FAILED} AND queue = 'orders'", name="another") == Replayed(2, 2)


def _by_store(url: str, ids: list[UUID]) -> list[UUID]:
    async def replay() -> list[UUID]:
        store: Any = await millpond.connect(url)
        try:
            return [published.id for published in await store.operations.replay(ids, name="fix") if published.new]
        finally:
            await store.close()

    return asyncio.run(replay())


def test_into_another_queue_and_not_too_fast(spark: Any, sqlite: str) -> None:
    assert replay(spark, sqlite, "true", to="again", rate=4).published == len(rows(sqlite, "archive"))
    again = replayed(sqlite).values()
    assert {row.queue for row in again} == {"again"}
    due = sorted(row.due_at for row in again)
    # Each has a quarter of a second for itself.
    assert all(later - earlier >= timedelta(seconds=0.249) for earlier, later in itertools.pairwise(due))
    assert due[-1] - due[0] < timedelta(seconds=len(due) / 4 * 2), "nor much too slow"


def test_several_databases(spark: Any, sqlite: str, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path / 'other.db'}"
    fill(other, ["elsewhere"], each=60)
    before = failed(sqlite, other)
    assert replay(spark, f"{sqlite} {other}") == Replayed(len(before), len(before))
    assert replayed(sqlite, other).keys() == before.keys()
    assert replayed(sqlite) and replayed(other), "by their keys and ids some go to each"


def test_what_only_the_lake_holds(spark: Any, sqlite: str, tmp_path: Path) -> None:
    lake, before = str(tmp_path / "lake"), failed(sqlite)
    export(spark, lake, sqlite, margin=0)
    _purge(sqlite)
    assert failed(sqlite) == {}
    database = {"url": sqlite}
    chosen = replaying.selected(spark, f"{FAILED} AND day >= '2020-01-01'", lake=lake)
    assert replaying.replay(chosen, name="fix", database=database) == Replayed(len(before), len(before))
    assert replayed(sqlite).keys() == before.keys()
    # The same holds for reports.
    found = report_on(spark, lake=lake, database=database)
    assert found.rows("summary")[0]["failed"] == len(before)
    assert sum(row["pending"] for row in found.rows("backlog")) >= len(before)


def _purge(url: str) -> None:
    async def purge() -> None:
        store: Any = await millpond.connect(url)
        await store.operations.purge(older_than=0)
        await store.close()

    asyncio.run(purge())


def test_a_body_above_the_usual_limit(spark: Any, sqlite_url: str) -> None:
    """Its publisher had a higher one. It stopped the replay of all selected messages."""

    async def fail_some() -> None:
        store: Any = await millpond.connect(sqlite_url, migrate=True, body_limit=BODY_LIMIT + 1)
        await store.publish([Message(queue="q", payload=b"x" * size) for size in (1, BODY_LIMIT + 1)])
        await store.settle([Reject(claim.receipt, "no") for claim in await store.claim(["q"], limit=2)])
        await store.close()

    asyncio.run(fail_some())
    assert replay(spark, sqlite_url).published == 2
    assert {len(row.payload) for row in replayed(sqlite_url).values()} == {1, BODY_LIMIT + 1}


def test_nothing_is_selected(spark: Any, sqlite: str) -> None:
    assert replay(spark, sqlite, "queue = 'none'") == Replayed(0, 0)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("stat = 'FAILED'", "`stat` cannot be resolved"),
        ("state = 'FAILED' AND", "Syntax error"),
        ("priority", '"INT"'),
    ],
)
def test_a_filter_that_cannot_be_used(spark: Any, sqlite: str, where: str, says: str) -> None:
    with pytest.raises(InvalidOption, match=says) as wrong:
        replay(spark, sqlite, where)
    assert "The columns are id (string), queue (string)" in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_options_out_of_range(spark: Any, sqlite: str) -> None:
    with pytest.raises(InvalidOption, match="more than 0"):
        replay(spark, sqlite, rate=0)
    with pytest.raises(InvalidQueue):
        replay(spark, sqlite, to="")
    with pytest.raises(InvalidQueue):
        replay(spark, sqlite, name="")
    assert replayed(sqlite) == {}


def test_the_command(spark: Any, sqlite: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["lake", "replay", "--url", sqlite, "--where", FAILED]
    count = len(failed(sqlite))
    assert run_command([*command, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["selected"] == count and found["counts"][-1] | {"queue": ""} == {
        "queue": "",
        "state": "FAILED",
        "messages": 2,
    }
    assert run_command([*command, "--dry-run"]) == 0
    assert "nothing was published" in capsys.readouterr().out
    assert replayed(sqlite) == {}
    assert run_command(command) == 2
    assert "needs a --name" in capsys.readouterr().err
    assert run_command([*command, "--name", "fix", "--to", "again"]) == 0
    assert capsys.readouterr().out == f"{count} published\n"
    assert run_command([*command, "--name", "fix", "--to", "again"]) == 0
    assert capsys.readouterr().out == f"0 published, {count} already published\n"
    assert run_command(["lake", "replay", "--url", sqlite, "--where", "int(queue) = 1", "--name", "fix"]) == 1
    assert capsys.readouterr().err.startswith("millpond: Spark: [CAST_INVALID_INPUT]")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_killed_between_two_databases(
    spark: Any, spark_cluster: SparkCluster, postgres_url: str, mariadb_url: str
) -> None:
    """On a cluster, where executors load the messages; another driver then finishes the replay."""
    for url in (postgres_url, mariadb_url):
        fill(url, ["orders"], each=300)
    both = f"{postgres_url} {mariadb_url}"
    before = failed(postgres_url, mariadb_url)
    arguments = [spark_cluster.url, spark_cluster.settings, FAILED, "fix", both]
    job = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "dying_replay.py"), json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    output, errors = job.communicate()
    assert output.splitlines()[-1:] == ["killed"], errors[-3000:]
    assert password(postgres_url) not in errors and password(mariadb_url) not in errors
    some = replayed(postgres_url, mariadb_url)
    assert 0 < len(some) < len(before), "killed in the middle"
    assert replay(spark, both) == Replayed(len(before), len(before) - len(some))
    assert replayed(postgres_url, mariadb_url).keys() == before.keys()
