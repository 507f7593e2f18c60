"""Publish and settle on a connection that the caller already has, in the caller's own transaction."""

from __future__ import annotations

from typing import Any, TypeVar

from millpond.transports.database.dialect import Dialect
from millpond.transports.database.statement import Steps

T = TypeVar("T")


async def run(dialect: Dialect, connection: Any, steps: Steps[T]) -> T:
    raise NotImplementedError


def run_sync(dialect: Dialect, connection: Any, steps: Steps[T]) -> T:
    raise NotImplementedError
