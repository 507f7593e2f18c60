"""`millpond demo` in a small size, on the session of all tests: its output and its files."""

from __future__ import annotations

import asyncio
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet
import pytest

import millpond.spark.lake
from millpond import Millpond, State
from millpond.cli import run_command as command
from millpond.cli.demo.command import other_readers, serve_command
from millpond.cli.demo.demo_folder import DemoFolder, orders
from tests.spark.lake.here import export
from tests.spark.lake.readers import READERS, connection
from tests.spark.ponds import fill

ORDERS = 10_000
"""Large enough that both workers are busy when one of them is killed."""
TO_NORWAY, DISCONTINUED = ORDERS // 50, ORDERS // 400


@pytest.mark.slow
def test_the_whole_story(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    code = command(["demo", "--orders", str(ORDERS), "--folder", str(folder)])
    said = capsys.readouterr()
    assert code == 0, said
    failed = TO_NORWAY + DISCONTINUED
    assert re.search(r"kill -9 \d+: one of the two workers dies", said.out)
    assert re.search(r"[\d.]+ s later its [\d,]+ messages are back", said.out)
    assert f"{ORDERS - failed:,} are shipped and {failed} failed; none is lost or waits" in said.out
    assert f"{ORDERS:,} messages, " in said.out, "in the lake"
    assert f"{TO_NORWAY} orders are published again" in said.out
    assert "What to try next" in said.out
    assert said.out.rstrip().endswith(shlex.join(serve_command(DemoFolder(folder))))

    lake = millpond.spark.lake.read(spark, folder / "lake")
    assert lake.count() == ORDERS
    assert lake.where("state = 'FAILED' AND error LIKE 'KeyError%' AND body.country = 'NO'").count() == TO_NORWAY
    (summary,) = pyarrow.parquet.read_table(folder / "report" / "summary.parquet").to_pylist()
    assert (summary["settled"], summary["completed"], summary["failed"]) == (ORDERS, ORDERS - failed, failed)
    assert summary["redeliveries"] > summary["retries"], "those of the killed worker too"
    page = folder / "report" / "report.html"
    assert page.as_uri() in said.out and "<html" in page.read_text()
    assert asyncio.run(counts(folder)) == {State.COMPLETED: ORDERS - DISCONTINUED, State.FAILED: failed}

    for line in other_readers((folder / "lake").resolve()):
        assert line in said.out
    assert {one.__name__: len(one(folder / "lake")) for one in READERS} == {one.__name__: ORDERS for one in READERS}


def test_other_programs_read_the_lake_by_one_line(
    sqlite_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that the demo prints, over a small lake; DuckDB has its extension from a package here."""
    fill(sqlite_url, ["orders"])
    export(tmp_path / "lake", sqlite_url)
    monkeypatch.setattr("duckdb.sql", connection().sql)
    for line in other_readers(tmp_path / "lake"):
        python, option, code = shlex.split(line, comments=True)
        assert (python, option) == ("python", "-c")
        script = tmp_path / "line.py"
        script.write_text(code)
        runpy.run_path(str(script))
        said = capsys.readouterr().out
        assert "COMPLETED" in said and "FAILED" in said


async def counts(folder: Path) -> dict[State, int]:
    pond = Millpond(f"sqlite:///{folder / 'orders.db'}")
    (stats,) = await (await pond.transport).operations.count(["orders"])
    await pond.close()
    return {state: number for state, number in stats.counts.items() if number}


def test_another_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert command(["demo", "--folder", str(tmp_path)]) == 2
    assert "files of other programs" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_a_folder_of_its_own_is_made_anew(tmp_path: Path) -> None:
    demo = DemoFolder(tmp_path / "demo")
    demo.prepare()
    (demo.folder / "orders.db").write_text("of the last time")
    demo.fix()
    demo.prepare()
    assert not (demo.folder / "orders.db").exists()
    assert '"NO"' in demo.fix(), "the bug was there again, to be fixed"


def test_orders_are_the_same_in_every_demo() -> None:
    made = list(orders(ORDERS))
    assert made == list(orders(ORDERS))
    assert sum(order["country"] == "NO" for order in made) == TO_NORWAY
    assert sum(order["sku"] == "fax-machine" for order in made) == DISCONTINUED


def test_the_dashboard_of_the_demo_is_one_command(tmp_path: Path) -> None:
    demo = DemoFolder(tmp_path / "demo")
    demo.prepare()
    fill(demo.url, ["orders"])
    with subprocess.Popen([*serve_command(demo), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1].removesuffix("/api/v1")
        assert "orders" in httpx.get(f"{address}/dashboard", timeout=60).text
        process.terminate()


def test_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "demo"
    assert command(["demo", "--folder", str(folder)]) == 2
    assert "Spark needs Java 17 or later; on Debian: apt-get install" in capsys.readouterr().err
    assert not folder.exists(), "it is said before anything is done"
