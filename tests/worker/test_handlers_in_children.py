"""A handler in a child process has all that it has in the worker: the same messages have the same results in both."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from millpond import Millpond, Row
from tests.waiting import ended
from tests.worker import every_handler
from tests.worker.conftest import on, suspect
from tests.worker.test_within import DRIVERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # thirty processes import the application

ROOT = Path(__file__).parent.parent.parent
QUEUES = [queue for s in every_handler.pond.subscriptions for queue in s.queues]


def start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    scheme, _, rest = url.partition("://")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        every_handler.URL: url,
        every_handler.DRIVER_URL: f"{scheme}+{DRIVERS[scheme]}://{rest}",
    }
    command = ["-m", "millpond", "run", every_handler.__name__, "--until-idle", "--log-format", "json"]
    with (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen([sys.executable, *command], cwd=folder, stderr=stderr, env=environment)


def facts(row: Row | None, crashes: int) -> tuple[Any, ...] | None:
    if row is None:
        return None
    waits = 0 if row.last_attempt_us is None or row.archived_us else round((row.due_us - row.last_attempt_us) / 6e8)
    return (row.state.value, row.attempts, row.deliveries - crashes, row.crashes, row.reason, row.error, waits)


@pytest.mark.long_on_servers
@on("sqlite", "postgresql", "mariadb")
async def test_results_are_the_same_in_the_worker_and_in_children(pond: Millpond, url: str, tmp_path: Path) -> None:
    ids = {}
    for crashes in (0, 2):
        for queue in QUEUES:
            message = {"key": "customer", "priority": 7, "headers": {"correlation-id": "order-7"}, "crashes": crashes}
            ids[queue, crashes] = await suspect(pond, queue, {"sku": 7}, **message)
    worker = start(url, tmp_path)
    try:
        code = await ended(worker)
    finally:
        worker.kill()
        worker.wait()
    stderr = (tmp_path / "stderr").read_text()
    assert code == 0, stderr

    assert "lost" not in stderr

    operations = (await pond.transport).operations
    found = {row.id: row for row in await operations.find(list(ids.values()))}
    rows = {queue: facts(found.get(ids[queue, 2]), 2) for queue in QUEUES}
    assert {queue: facts(found.get(ids[queue, 0]), 0) for queue in QUEUES} == rows
    assert rows["returns"] == ("COMPLETED", 1, 1, 0, None, None, 0)
    assert rows["raises"] == ("RETRYABLE", 1, 1, 0, None, "ValueError: a (removed)", 6)
    assert rows["leaves_no_trace"] is None
    assert rows["rolls_back"] is not None and rows["rolls_back"][5].startswith("RolledBack: ")
    assert len(await operations.browse("published", limit=100)) == 4

    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    settled = [note for note in notes if note["name"] == "settled"]
    assert {note["pid"] for note in settled} == {worker.pid}, "subscribers of telemetry are in the worker"
    counts = Counter[str]()
    for note in settled:
        counts[note["queue"]] += note["count"]
    transactions = {"acks_in_a_transaction", "nacks_in_a_transaction", "rolls_back"}
    assert {queue for queue, count in counts.items() if count == 2} >= set(QUEUES) - transactions
    assert set(counts) == set(QUEUES)

    by_handlers = [note for note in notes if note["name"] != "settled"]
    places = {where: [note for note in by_handlers if (note["pid"] == worker.pid) is where] for where in (True, False)}
    same = [sorted(json.dumps({**note, "pid": 0}) for note in places[where]) for where in (True, False)]
    assert same[0] == same[1] and len(same[0]) == 5
    assert {"name": "runs on", "pid": 0, "lost": False, "interrupted": False} in map(json.loads, same[0])

    logged = [line for line in map(json.loads, stderr.splitlines()) if line["message"] == "shipping"]
    assert {line["message_id"] for line in logged} == {str(ids["returns", crashes]) for crashes in (0, 2)}
    assert {line["correlation_id"] for line in logged} == {"order-7"}
    assert len({line["process"] for line in logged}) == 2
