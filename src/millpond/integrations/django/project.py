"""The pond of a Django project, and publishing on Django's connection."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Unpack

from django.conf import settings
from django.db import transaction

from millpond.ids import PublishedId
from millpond.integrations.django.connections import instrument
from millpond.integrations.django.database import alias, database_url, options
from millpond.integrations.django.django_pond import DjangoPond
from millpond.publishing import PublishOptions

__all__ = ["alias", "database_url", "options", "publish", "the_pond"]


@cache
def the_pond() -> DjangoPond:
    """The project's pond, with working database connections for its handlers, and the subscribers of Django's tasks."""
    made = DjangoPond(**options())
    instrument(made)
    if getattr(settings, "TASKS", None) and (find_spec("django.tasks") or find_spec("django_tasks")):
        from millpond.integrations.django.tasks import declare_tasks

        declare_tasks(made)
    return made


def publish(queue: str, body: Any, *, using: str | None = None, **given: Unpack[PublishOptions]) -> PublishedId:
    """Publish on Django's connection: with the transaction that is open, or at once if there is none.

    While the pond is tested with a database of its own (`pond.testing_sync()`), the message is in that one.
    """
    name = using or alias()
    with transaction.atomic(using=name):
        given["within"] = the_pond().connection_of(name)
        return the_pond().publish_sync(queue, body, **given)
