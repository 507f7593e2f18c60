"""Handlers in Django's tests use the connections of the test: its open transaction, or its database in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from django.db import connections, transaction

from millpond import transports

_shared: dict[str, Any] = {}
"""Connections of the thread that runs the test, by alias. Empty: no test shares them."""
_turn = threading.Lock()
"""One handler at a time: a connection has one transaction."""
_waiters = ThreadPoolExecutor(1, "millpond-turn")
"""The thread in which event loops wait for the turn."""


@contextmanager
def shared_connections() -> Iterator[None]:
    """Let handlers use the connections of this thread, which must only wait for them meanwhile."""
    own = {alias: connections[alias] for alias in connections}
    for connection in own.values():
        connection.inc_thread_sharing()
    _shared.update(own)
    try:
        yield
    finally:
        _shared.clear()
        for connection in own.values():
            connection.dec_thread_sharing()


def are_shared() -> bool:
    return bool(_shared)


def empty(using: str, url: str, **options: Any) -> None:
    """Delete all messages, schedules and settings: Django's `flush` after a test knows only the tables of models."""
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        for statement in transports.deletes(url, **options):
            cursor.execute(statement)


@contextmanager
def turn_in_thread() -> Iterator[None]:
    """A handler's turn, in its thread."""
    with _turn:
        kept = _take()
        try:
            yield
        finally:
            _give_back(kept)


@asynccontextmanager
async def turn_in_loop() -> AsyncIterator[None]:
    """The turn of an async handler, whose ORM calls run in Django's thread for synchronous code."""
    from asgiref.sync import sync_to_async

    waiter = _waiters.submit(_turn.acquire)
    try:
        await asyncio.wrap_future(waiter)
    except BaseException:
        waiter.add_done_callback(_release)  # the thread may have the turn, or get it later
        raise
    try:
        kept = await sync_to_async(_take)()
        try:
            yield
        finally:
            await sync_to_async(_give_back)(kept)
    finally:
        _turn.release()


def _release(waiter: Future[bool]) -> None:
    if not waiter.cancelled():
        _turn.release()


def _take() -> dict[str, Any]:
    """Use the shared connections in this thread; returns those that it had."""
    kept = {connection.alias: connection for connection in connections.all(initialized_only=True)}
    for alias, connection in _shared.items():
        connections[alias] = connection
    return kept


def _give_back(kept: dict[str, Any]) -> None:
    for alias in connections:
        if alias in kept:
            connections[alias] = kept[alias]
        else:
            del connections[alias]
