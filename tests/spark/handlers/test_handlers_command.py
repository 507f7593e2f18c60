"""`millpond run --on spark`: a signal on a local Spark, and kills on a cluster with a shipped module."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millpond import State
from millpond.cli import run_command as command
from servers import SparkCluster
from servers.processes import family
from tests.spark.handlers.shop import Shop
from tests.waiting import ended, is_alive, until

pytestmark = pytest.mark.slow_on_servers


@pytest.fixture
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    (tmp_path / "shop").mkdir()
    shop = Shop(tmp_path / "shop", request.getfixturevalue(request.param))
    yield shop
    await shop.close()


@pytest.mark.java
@pytest.mark.parametrize("shop", ["sqlite_url"], indirect=True)
async def test_a_signal_to_the_driver(shop: Shop) -> None:
    await shop.pond.publish_many("orders", list(range(20)))
    await shop.pond.publish("held", 1)
    process = shop.start(shop.module(shop.folder), "--on", "spark", "--master", "local[2]", cwd=shop.folder)
    await until(lambda: (shop.notes("held") and len(shop.workers()) == 2) or process.poll() is not None)
    assert await shop.drained("orders") == {State.COMPLETED: 18, State.FAILED: 2}, shop.stderr
    process.terminate()
    await until(lambda: shop.stderr.count("stopping:") == 2)
    assert process.poll() is None
    shop.give_the_word()
    assert await ended(process) == 0, shop.stderr
    assert await shop.drained("held") == {State.COMPLETED: 1}
    assert "2 tasks of local[2]" in shop.stderr
    assert "23 handled, 0 in flight, 2 retried, 2 failed" in shop.stderr
    assert not any(is_alive(pid) for pid in shop.workers())


@pytest.mark.parametrize("shop", ["postgres_url"], indirect=True)
async def test_executors_and_drivers_killed_on_a_cluster(
    shop: Shop, spark_cluster: SparkCluster, tmp_path: Path
) -> None:
    shipped, elsewhere = tmp_path / "shipped.zip", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(shipped, "w") as file:
        file.writestr(f"{shop.name}.py", shop.code)
    conf = [word for name, value in spark_cluster.settings.items() for word in ("--conf", f"{name}={value}")]
    options = ["--on", "spark", "--master", spark_cluster.url, "--py-files", str(shipped), "--tasks", "2", *conf]
    await shop.pond.publish_many("held", list(range(8)))
    process = shop.start(f"{shop.name}:pond", *options, cwd=elsewhere)
    await until(lambda: len(shop.notes("held")) == 2 or process.poll() is not None)
    assert process.poll() is None, shop.stderr

    killed = shop.workers()[0]
    for pid in executor_of(killed, spark_cluster):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: len(shop.workers()) == 3)  # Spark has started another, and its task runs again
    await until(lambda: len(shop.notes("held")) == 3)
    assert process.poll() is None, shop.stderr

    for pid in family(process.pid):
        os.kill(pid, signal.SIGKILL)  # the driver and its JVM
    await ended(process)
    shop.give_the_word()
    await until(lambda: not any(is_alive(pid) for pid in shop.workers()))
    last = shop.start(shop.module(shop.folder), cwd=shop.folder)
    assert await shop.drained("held") == {State.COMPLETED: 8}
    last.terminate()
    assert await ended(last) == 0, shop.stderr
    runs = [(int(n), int(deliveries)) for n, deliveries, _ in shop.notes("held")]
    assert {n for n, _ in runs} == set(range(8)), "none is lost"
    assert len(set(runs)) == len(runs), "what was delivered again is told so"


def executor_of(worker: int, cluster: SparkCluster) -> list[int]:
    """The worker's process and its parents up to the executor's JVM: all that die with a machine."""
    found = []
    daemons = {server.pid for server in cluster.workers}
    while worker not in daemons and worker > 1:
        found.append(worker)
        worker = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    return found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "2"], "are for --on spark"),
        (["--on", "spark", "--workers", "2"], "use --tasks"),
        (["--on", "spark", "--conf", "spark.ui.enabled"], "NAME=VALUE"),
        (["--on", "spark", "--master", "spark://127.0.0.1:1"], "is a file of one machine"),
    ],
)
def test_what_is_wrong_with_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    shop = Shop(tmp_path, f"sqlite:///{tmp_path / 'pond.db'}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert command(["run", shop.module(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err
