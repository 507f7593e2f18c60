"""`millpond demo`: all of Millpond in about a minute, on SQLite and a local Spark, without any server."""

from __future__ import annotations

from millpond.cli.demo.command import demo

__all__ = ["demo"]
