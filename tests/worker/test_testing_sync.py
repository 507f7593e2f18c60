"""The synchronous form of the testing kit, its assertions, and the fixtures of the pytest plugin."""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import ANY

import pytest

from millpond import Delivery, Millpond, State

pond = Millpond("postgresql://nobody@localhost:1/never-connected")


@pond.subscriber("orders")
async def ship(order: dict, delivery: Delivery) -> None:
    if order["sku"] == 13:
        raise ValueError("out of stock")
    await pond.publish("invoices", order, delay=60, key="c-7", headers={"source": "ship"})


@pond.subscriber("invoices")
def invoice(order: dict) -> None:
    pond.publish_sync("mails", order)


def test_a_synchronous_test_publishes_runs_and_checks() -> None:
    with pond.testing_sync() as test:
        pond.publish_sync("orders", {"sku": 7})
        assert test.run() == 1
        test.assert_published("invoices", {"sku": 7}, key="c-7", delay=60, headers={"source": "ship"})
        test.assert_published("mails", {"sku": 7}, times=0)
        test.advance(60)
        assert test.run("invoices") == 1
        assert test.bodies("mails") == [{"sku": 7}]
        (message,) = test.published("mails")
        assert (message.body, message.state, message.delay) == ({"sku": 7}, State.PENDING, 0)
        assert [row.state for row in test.messages("invoices")] == [State.COMPLETED]


@dataclass
class Order:
    sku: int


def test_a_body_is_compared_as_it_was_published() -> None:
    with pond.testing_sync() as test:
        for body in (Order(7), [Order(8)], "text", b"\0", (1, 2)):
            pond.publish_sync("parcels", body)
            test.assert_published("parcels", body)
        test.assert_published("parcels", {"sku": ANY})
        test.assert_published("parcels", Order(9), times=0)


def test_errors_of_handlers_surface() -> None:
    with pond.testing_sync() as test:
        pond.publish_sync("orders", {"sku": 13})
        with pytest.raises(ValueError, match="out of stock"):
            test.run()
    with pond.testing_sync(raise_errors=False) as test:
        pond.publish_sync("orders", {"sku": 13})
        assert test.run() == 1


def test_a_wrong_assertion_shows_the_messages_that_are_there() -> None:
    with pond.testing_sync() as test:
        pond.publish_sync("orders", {"sku": 7}, key="c-8")
        for wrong in ({"key": "c-7"}, {"delay": 5}, {"headers": {"a": 1}}, {"times": 2}):
            with pytest.raises(AssertionError, match="c-8"):
                test.assert_published("orders", {"sku": 7}, **wrong)
        with pytest.raises(TypeError, match="no field 'colour'"):
            test.assert_published("orders", {"sku": 7}, colour="x")


def test_within_a_transaction_on_sqlite(tmp_path: Path) -> None:
    import sqlite3

    with pond.testing_sync(f"sqlite:///{tmp_path}/t.db") as test:
        connection = sqlite3.connect(tmp_path / "t.db")
        pond.publish_sync("orders", {"sku": 7}, within=connection)
        connection.rollback()
        pond.publish_sync("orders", {"sku": 8}, within=connection)
        connection.commit()
        connection.close()
        assert test.bodies("orders") == [{"sku": 8}]
        assert test.run() == 1


def test_on_a_server(postgres_url: str) -> None:
    with pond.testing_sync(postgres_url) as test:
        pond.publish_sync("orders", {"sku": 7})
        assert test.run() == 1
        test.assert_published("invoices", {"sku": 7}, delay=60)


PLUGIN_TESTS = """
import shop

def test_sync(pond_test):
    shop.pond.publish_sync("orders", 7)
    assert pond_test.run() == 1
    pond_test.assert_published("mails", 7)

async def test_async(async_pond_test):
    await shop.ship.publish(8)
    assert await async_pond_test.run() == 1
    assert await async_pond_test.bodies("mails") == [8]

def test_error(pond_test):
    shop.pond.publish_sync("orders", 13)
    pond_test.run()
"""


def test_the_plugin_has_fixtures_for_both_kinds_of_tests(tmp_path: Path) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    plugin = project["project"]["entry-points"]["pytest11"]["millpond"]
    (tmp_path / "shop.py").write_text(
        "from millpond import Millpond\n"
        "pond = Millpond('postgresql://nobody@localhost:1/never')\n"
        "@pond.subscriber('orders')\n"
        "def ship(body: int) -> None:\n"
        "    assert body != 13\n"
        "    pond.publish_sync('mails', body)\n"
    )
    (tmp_path / "test_shop.py").write_text(PLUGIN_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmillpond_pond = shop:pond\npythonpath = .\nasyncio_mode = auto\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "2 passed" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_shop.py::test_error" in done.stdout
