"""A backend for Django's tasks: `@task` functions run in Millpond's workers.

    TASKS = {"default": {"BACKEND": "millpond.integrations.django.tasks.MillpondBackend", "QUEUES": ["default"]}}

It serves `django.tasks`, which Django has from version 6.0 on, and the package django-tasks for earlier versions.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.utils import timezone
from django.utils.module_loading import import_string

from millpond.errors import InvalidOption
from millpond.integrations.django import project
from millpond.message import DEFAULT_PRIORITY
from millpond.outcome import DECISIONS, RejectMessage
from millpond.pond import Millpond
from millpond.retry import Retry
from millpond.worker import Delivery

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:  # before Django 6.0
    try:
        from django_tasks import task_backends
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
        from django_tasks.signals import task_enqueued, task_finished, task_started
    except ImportError:
        raise InvalidOption("Django has tasks from version 6.0 on; install django-tasks for earlier versions") from None


class TaskCall(msgspec.Struct, frozen=True):
    """The body of a task's message."""

    task: str
    """Module and name of the function."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    priority: int = 0
    """The priority of Django: from -100 to 100, the highest number first."""


class MillpondBackend(BaseTaskBackend):
    """Tasks as messages in the project's database.

    A queue of Django is the queue of Millpond with the same name. OPTIONS are those of a subscriber; without `retry` a
    task runs once, as Django describes it. Return values are not stored.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self._worker_id = f"{socket.gethostname()}:{os.getpid()}"

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Publish on Django's connection: the task runs if and only if the open transaction commits."""
        self.validate_task(task)
        made = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        due = task.run_after
        if due is not None and timezone.is_naive(due):
            due = timezone.make_aware(due)
        body = TaskCall(task.module_path, made.args, made.kwargs, task.priority)
        priority = DEFAULT_PRIORITY - task.priority // 2
        published = project.publish(task.queue_name, body, priority=priority, due_at=due)
        result = replace(made, id=str(published))
        task_enqueued.send(type(self), task_result=result)
        return result

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Checks of `manage.py check`: workers must know the queues."""
        yield from super().check(**kwargs)
        if not self.queues:
            yield checks.Error(f"TASKS[{self.alias!r}] must name its QUEUES: workers serve these.", id="millpond.E001")

    def declare(self, pond: Millpond) -> None:
        """Declare the subscriber of the backend's queues."""
        if self.queues:
            options: dict[str, Any] = {"retry": Retry.none(), **self.options}
            pond.subscriber(*sorted(self.queues), **options)(self._run)

    def _run(self, call: TaskCall, delivery: Delivery) -> None:
        """Run a task in a thread; signals are sent around each attempt."""
        task = _task(call).using(queue_name=delivery.queue, priority=call.priority, backend=self.alias)
        result = TaskResult(
            task=task,
            id=str(delivery.id),
            status=TaskResultStatus.RUNNING,
            enqueued_at=delivery.claim.created_at,
            started_at=timezone.now(),
            finished_at=None,
            last_attempted_at=timezone.now(),
            args=call.args,
            kwargs=call.kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=["unknown"] * (delivery.attempt - 1) + [self._worker_id],
        )
        task_started.send(sender=type(self), task_result=result)
        context = [TaskContext(task_result=result)] if task.takes_context else []
        try:
            task.call(*context, *call.args, **call.kwargs)
        except DECISIONS:
            raise  # by hand: no failure of the task
        except Exception as error:
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            text = "".join(traceback.format_exception(error))
            self._finish(replace(result, errors=[TaskError(exception_class_path=path, traceback=text)]), "FAILED")
            raise
        self._finish(result, "SUCCESSFUL")

    def _finish(self, result: Any, status: str) -> None:
        done = replace(result, status=TaskResultStatus(status), finished_at=timezone.now())
        task_finished.send(type(self), task_result=done)


def declare_tasks(pond: Millpond) -> None:
    """Declare the subscribers of all backends of this class in the settings."""
    for alias, params in settings.TASKS.items():
        if issubclass(import_string(params["BACKEND"]), MillpondBackend):
            task_backends[alias].declare(pond)


def _task(call: TaskCall) -> Any:
    """The task with this path. Messages may import only modules of installed apps."""
    module = call.task.rpartition(".")[0]
    if module not in sys.modules and apps.get_containing_app_config(module) is None:
        raise RejectMessage(f"the module of the task {call.task!r} is neither imported nor in an installed app")
    try:
        task = import_string(call.task)
    except ImportError as error:
        raise RejectMessage(f"there is no task {call.task!r}") from error
    if not isinstance(task, Task):
        raise RejectMessage(f"{call.task!r} is not a task")
    return task
