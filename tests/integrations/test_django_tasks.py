"""Django's tasks run in Millpond's workers: a project whose TASKS setting names the backend.

Each part runs in another process, because Django is set up once for each. With Django 6.0 and later these tests use
`django.tasks`, with earlier versions the package django-tasks.
"""

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """
from pathlib import Path

SECRET_KEY = "only for this test"
INSTALLED_APPS = ["shop", "millpond.integrations.django", *({"django_tasks"} & {library})]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path("shop.db").absolute()}}
TASKS = {
    "default": {"BACKEND": "millpond.integrations.django.tasks.MillpondBackend", "QUEUES": ["default", "mails"]},
    "patient": {
        "BACKEND": "millpond.integrations.django.tasks.MillpondBackend",
        "QUEUES": ["slow"],
        "OPTIONS": {"max_workers": 1, "retry": Retry.constant(0, attempts=3)},
    },
    "at once": {"BACKEND": f"{library}.backends.immediate.ImmediateBackend"},
}
USE_TZ = True
"""
FIRST = """
from importlib.util import find_spec
from millpond import Retry

library = "django.tasks" if find_spec("django.tasks") else "django_tasks"
"""
LIBRARY = """
try:
    from django.tasks import task
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    from django_tasks import task
    from django_tasks.signals import task_enqueued, task_finished, task_started
"""
TASKS = """
from millpond import RejectMessage

@task
def ship(sku, *, express=False):
    print(f"shipped {sku} {express}\\n", end="")  # in one piece, beside other threads

@task(priority=50)
async def invoice(number):
    print(f"invoice {number}\\n", end="")

@task(queue_name="mails", takes_context=True)
def mail(context, address):
    print(f"mail {address} in attempt {context.attempt} of {context.task_result.id}\\n", end="")

@task
def fail():
    raise ValueError("out of stock")

@task(backend="patient", queue_name="slow", takes_context=True)
def third_time_lucky(context):
    if context.attempt < 3:
        raise ConnectionError("the carrier does not answer")
    print(f"lucky in attempt {context.attempt}\\n", end="")

@task
def refuse():
    raise RejectMessage("no such order")

def no_task():
    print("this must not run")
"""
PUBLISH = """
import django
django.setup()
from datetime import timedelta
from django.core.management import call_command
from django.db import transaction
from django.utils import timezone
from shop import tasks

class RolledBack(Exception): ...

call_command("migrate", verbosity=0)
with transaction.atomic():
    tasks.ship.enqueue("teapot", express=True)
    tasks.invoice.enqueue(7)
    print("id", tasks.mail.enqueue("a@example.org").id)
try:
    with transaction.atomic():
        tasks.ship.enqueue("rolled back")
        raise RolledBack
except RolledBack:
    pass
tasks.ship.using(run_after=timezone.now() + timedelta(days=1)).enqueue("tomorrow")
tasks.fail.enqueue()
tasks.third_time_lucky.enqueue()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "tasks.py").write_text(LIBRARY + TASKS)
    (tmp_path / "settings.py").write_text(FIRST + SETTINGS)
    return tmp_path


def run(project: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(project), *sys.path]),
            "DJANGO_SETTINGS_MODULE": "settings",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_workers_run_tasks_whose_transaction_was_committed(project: Path) -> None:
    (project / "publish.py").write_text(PUBLISH)
    published = run(project, "publish.py").split()
    out = run(project, "-m", "django", "millpond", "run", "--until-idle")
    assert "shipped teapot True" in out and "invoice 7" in out
    assert f"mail a@example.org in attempt 1 of {published[published.index('id') + 1]}" in out
    assert "rolled back" not in out and "tomorrow" not in out
    assert "lucky in attempt 3" in out
    with contextlib.closing(sqlite3.connect(project / "shop.db")) as database:
        (failed,) = database.execute("SELECT error FROM millpond_archive WHERE state = 'FAILED'")
        (later,) = database.execute("SELECT payload FROM millpond_message")
    assert failed == ("ValueError: out of stock",) and b"tomorrow" in later[0]


IN_DJANGOS_TESTS = """
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.test import TestCase, override_settings
from millpond.integrations.django import pond, publish
from shop import tasks


class Tasks(TestCase):
    def setUp(self):
        self.seen = []
        for signal in (task_enqueued, task_started, task_finished):
            signal.connect(self.note)
            self.addCleanup(signal.disconnect, self.note)

    def note(self, signal, task_result, **_):
        names = {task_enqueued: "enqueued", task_started: "started", task_finished: "finished"}
        self.seen.append((names[signal], task_result.status))

    def test_signals_around_a_task(self):
        with pond.testing_sync() as test:
            tasks.ship.enqueue("teapot")
            self.assertEqual(test.run(), 1)
        self.assertEqual(self.seen, [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "SUCCESSFUL")])

    def test_signals_of_a_failure(self):
        with pond.testing_sync(raise_errors=False) as test:
            tasks.fail.enqueue()
            test.run()
            self.assertEqual([one.state for one in test.messages("default")], ["FAILED"])
        self.assertEqual(self.seen[-1], ("finished", "FAILED"))

    def test_a_decision_is_no_failure(self):
        with pond.testing_sync() as test:
            tasks.refuse.enqueue()
            test.run()
            self.assertEqual([one.reason for one in test.messages("default")], ["no such order"])
        self.assertEqual(self.seen[-1], ("started", "RUNNING"))

    def test_the_highest_priority_is_first(self):
        with pond.testing_sync() as test:
            for priority in (-100, 0, 100):
                tasks.ship.using(priority=priority).enqueue("teapot")
            self.assertEqual([one.priority for one in test.published("default")], [100, 50, 0])

    def test_only_tasks_run(self):
        paths = ["shop.tasks.no_task", "shop.tasks.nothing", "shop.nowhere.ship", "os.abort", "this.task", "ship"]
        with pond.testing_sync() as test:
            for path in paths:
                publish("default", {"task": path})
            test.run()
            self.assertEqual([one.state for one in test.messages("default")], ["FAILED"] * len(paths))
            self.assertIn("neither imported", test.messages("default")[4].reason)

    def test_without_the_kit_tasks_are_in_the_database_of_the_test(self):
        tasks.ship.enqueue("teapot")
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM millpond_message")
            self.assertEqual(cursor.fetchone(), (1,))

    async def test_enqueue_in_an_event_loop(self):
        async with pond.testing() as test:
            await tasks.ship.aenqueue("teapot")
            self.assertEqual(await test.run(), 1)

    def test_queues_must_be_named(self):
        backend = {"BACKEND": "millpond.integrations.django.tasks.MillpondBackend", "QUEUES": []}
        with override_settings(TASKS={"default": backend}), self.assertRaisesMessage(SystemCheckError, "QUEUES"):
            call_command("check")
"""


def test_djangos_own_tests_run_tasks(project: Path) -> None:
    (project / "test_tasks.py").write_text(LIBRARY + IN_DJANGOS_TESTS)
    run(project, "-m", "django", "test", ".")
