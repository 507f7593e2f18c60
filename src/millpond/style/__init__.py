"""The look that the report page and the dashboard share: colours, cards, tables and charts."""

from __future__ import annotations

from importlib import resources


def base() -> str:
    """The style sheet that both begin with."""
    return (resources.files(__package__) / "base.css").read_text(encoding="utf-8")
