"""Django: an app with the pond of the project, its tables by `migrate`, and the command `manage.py millpond`.

    INSTALLED_APPS = [..., "millpond.integrations.django"]
    MILLPOND = {"DATABASE": "default", "OPTIONS": {}}

`from millpond.integrations.django import pond` is the pond in that database. Handlers are in modules `handlers` of your
apps, which workers import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millpond.integrations.django.connections import instrument

if TYPE_CHECKING:
    from millpond.pond import Millpond

    pond: Millpond

__all__ = ["database_url", "instrument", "pond", "publish"]


def __getattr__(name: str) -> Any:
    """Make the pond when it is first used: the settings are there by then."""
    if name in ("pond", "database_url", "publish"):
        from millpond.integrations.django import project

        return project.the_pond() if name == "pond" else getattr(project, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
