"""The app: Millpond's tables are created and updated together with the project's."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class MillpondConfig(AppConfig):
    name = "millpond.integrations.django"
    label = "millpond"
    verbose_name = "Millpond"

    def ready(self) -> None:
        from millpond.integrations.django.database import remember_configured

        remember_configured()
        post_migrate.connect(_migrate, sender=self, dispatch_uid="millpond")


def _migrate(using: str, verbosity: int = 1, **_: Any) -> None:
    """Called at the end of `manage.py migrate`, also for test databases."""
    from millpond.integrations.django.migrate_tables import migrate
    from millpond.integrations.django.project import alias

    if using == alias():
        migrate(using, verbosity)
