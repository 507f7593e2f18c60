"""The modules `handlers` of a project's apps."""

from __future__ import annotations

from django.utils.module_loading import autodiscover_modules


def import_handlers() -> None:
    """Import the modules `handlers` of all installed apps: they declare subscribers."""
    autodiscover_modules("handlers")
