"""A view publishes and its handlers run, in Django's own tests: in the test's transaction, and in separate ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = Path(__file__).parents[2] / "examples" / "django_shop"
SETTINGS = """
from settings import *
from pathlib import Path
"""
IN_A_FILE = 'DATABASES["default"]["TEST"] = {"NAME": Path("test.db").absolute()}\n'
TESTS = """
from unittest.mock import patch

from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from millpond.errors import InvalidOption
from millpond.integrations.django import database, database_url, django_pond, pond, publish
from shop.models import Order


@pond.subscriber("shipped in a thread", max_workers=4)
def ship(order: int) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order).update(shipped=True)


@pond.subscriber("shipped in the loop")
async def ship_async(order: int) -> None:
    await Order.objects.filter(pk=order).aupdate(shipped=True)


class InTheTestsTransaction(TestCase):
    def test_handlers_see_and_change_the_tests_rows(self):
        orders = [Order.objects.create(sku="teapot").pk for _ in range(8)]
        with pond.testing_sync() as test:
            for order in orders:
                publish("shipped in a thread" if order % 2 else "shipped in the loop", order)
            self.assertEqual(test.run(), len(orders))
        self.assertEqual(Order.objects.filter(shipped=True).count(), len(orders))

    def test_they_are_rolled_back(self):
        self.assertEqual(Order.objects.count(), 0)

    def test_a_view(self):
        with pond.testing_sync() as test:
            order = self.client.post("/orders", {"sku": "teapot"}).json()["order"]
            test.assert_published("orders", {"order": order})

    async def test_async_tests_have_the_handlers_of_all_apps_too(self):
        with patch.object(django_pond, "import_handlers") as imported:
            async with pond.testing():
                imported.assert_called_once()


    async def test_an_async_view_publishes_in_the_transaction_too(self):
        await pond.publish("async", 1)
        await pond.publish_many("async", [2, 3])
        self.assertEqual(await sync_to_async(waiting)(), 3)

    def test_its_messages_are_rolled_back(self):
        self.assertEqual(waiting(), 0)


def waiting():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM millpond_message WHERE queue = 'async'")
        return cursor.fetchone()[0]


class InATransactionOfTheirOwn(TransactionTestCase):
    def test_a_handler_acks_within_its_transaction(self):
        if connection.is_in_memory_db():
            with self.assertRaisesMessage(InvalidOption, "TEST NAME"), pond.testing_sync(database_url()):
                pass
            return
        with pond.testing_sync(database_url()) as test:
            self.client.post("/orders", {"sku": "teapot"})
            self.assertEqual(test.run(), 1)
            self.assertTrue(Order.objects.get().shipped)
            self.assertEqual([one.state for one in test.messages("orders")], ["COMPLETED"])

    def test_b_messages_of_an_earlier_test_are_gone(self):
        if connection.is_in_memory_db():
            return
        with pond.testing_sync(database_url()) as test:
            self.assertEqual(test.messages("orders"), [])
            self.assertEqual(test.run(), 0)
            self.client.post("/orders", {"sku": "kettle"})  # waits

    def test_c_also_one_that_waits(self):
        self.test_b_messages_of_an_earlier_test_are_gone()

    def test_d_a_database_that_is_not_the_tests_keeps_its_messages(self):
        if connection.is_in_memory_db():
            return
        with pond.testing_sync(database_url()) as test:
            self.client.post("/orders", {"sku": "teapot"})
        with patch.object(database, "_configured", str(connection.settings_dict["NAME"])):
            with pond.testing_sync(database_url()) as test:
                self.assertEqual(len(test.messages("orders")), 1)
"""


@pytest.mark.parametrize("own_file", [False, True], ids=["in memory", "in a file"])
def test_views_and_handlers(tmp_path: Path, own_file: bool) -> None:
    (tmp_path / "settings_of_test.py").write_text(SETTINGS + IN_A_FILE * own_file)
    (tmp_path / "test_shop.py").write_text(TESTS)
    path = os.pathsep.join([str(tmp_path), str(SHOP), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "django", "test", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "settings_of_test"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 10 tests" in done.stderr
