"""`millpond demo`: shows all of Millpond in about a minute, on SQLite and a local Spark, without a server."""

from millpond.cli.demo.command import demo

__all__ = ["demo"]
