"""A transaction of another program that holds a lock on all messages, or only a snapshot of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncmy
import asyncpg

from millpond.transports.url import Url

_LOCK = "SELECT 1 FROM millpond_message FOR UPDATE"
_SEE = "SELECT 1 FROM millpond_message"


@asynccontextmanager
async def held_transaction(url: str, *, snapshot: bool = False) -> AsyncIterator[None]:
    if url.startswith("postgres"):
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction(isolation="repeatable_read" if snapshot else None):
                await connection.execute(_SEE if snapshot else _LOCK)
                yield
        finally:
            await connection.close()
        return
    parsed = Url(url)
    address = {"host": parsed.host, "port": parsed.port, "user": parsed.user, "password": parsed.password}
    connection = await asyncmy.connect(db=parsed.path.strip("/"), **address)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT" if snapshot else "BEGIN")
            await cursor.execute(_SEE if snapshot else _LOCK)
            yield
    finally:
        connection.close()
