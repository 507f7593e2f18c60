"""A Django project on a server: its tables, its tests, a view and a worker.

Below Django is psycopg 3, or PyMySQL in the place of mysqlclient, which needs a C compiler.
"""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

SHOP = Path(__file__).parents[2] / "examples" / "django_shop"
SETTINGS = """
import pymysql
from settings import *

pymysql.version_info = (2, 2, 7, "final", 0)  # Django asks for that of mysqlclient
pymysql.install_as_MySQLdb()
DATABASES = {"default": %r}
"""
TESTS = """
from django.db import connection
from django.test import Client, TestCase, TransactionTestCase
from millpond.integrations.django import database_url, pond
from shop.models import Order


class InTheTestsTransaction(TestCase):
    async def test_no_connection_delays_the_drop_of_the_database(self):
        await pond.publish("orders", {"order": 7})

    def test_a_view(self):
        with pond.testing_sync() as test:
            self.client.post("/orders", {"sku": "teapot"})
            test.assert_published("orders", {"order": Order.objects.get().pk})


class InATransactionOfTheirOwn(TransactionTestCase):
    def test_a_handler_acks_within_its_transaction(self):
        with pond.testing_sync(database_url()) as test:
            self.client.post("/orders", {"sku": "teapot"})
            self.assertEqual(test.run(), 1)
            self.assertTrue(Order.objects.get().shipped)
            self.assertEqual([one.state for one in test.messages("orders")], ["COMPLETED"])
"""
TAKE = """
from django.db import transaction
from django.test import Client
from shop.models import Order
with transaction.atomic():
    Client().post("/orders", {"sku": "kettle"})
    transaction.set_rollback(True)
Client().post("/orders", {"sku": "teapot"})
"""
CHECK = """
from shop.models import Order
print(list(Order.objects.values_list("sku", "shipped")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_a_project_on_a_server(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    at = urlsplit(request.getfixturevalue(f"{kind}_url"))
    engine = {"postgres": "postgresql", "mariadb": "mysql"}[kind]
    facts = {"NAME": at.path[1:], "HOST": at.hostname, "PORT": at.port, "USER": at.username, "PASSWORD": at.password}
    database = {"ENGINE": f"django.db.backends.{engine}", **facts}
    (tmp_path / "settings_of_server.py").write_text(SETTINGS % database)
    (tmp_path / "test_shop.py").write_text(TESTS)

    def manage(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, SHOP / "manage.py", *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "settings_of_server",
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(SHOP), *sys.path]),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "Ran 3 tests" in manage("test", "--noinput", str(tmp_path))
    manage("migrate")
    manage("shell", "-c", TAKE)
    manage("millpond", "run", "--until-idle")
    assert "[('teapot', True)]" in manage("shell", "-c", CHECK)
