"""An operator's move of a key range that kills itself before a step: `python -m tests.faults.mover`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import millpond
from millpond.transports.database.store import DatabaseStore
from millpond.transports.key_range import KeyRange
from millpond.transports.sharded.connect import opened
from millpond.transports.sharded.mover import Mover, changes
from millpond.transports.url import Url
from tests.faults.aim import die


async def connect_one(url: Url, **options: Any) -> DatabaseStore:
    found = await millpond.connect(url.raw, **options)
    assert isinstance(found, DatabaseStore)
    return found


async def move(wanted: str, target: str, fatal: str, *urls: str) -> None:
    async def on_step(step: str) -> None:
        if step == fatal:
            die()

    async with opened([Url(url) for url in urls], connect_one, {}) as (stores, map_):
        for change in changes(map_, KeyRange.parse(wanted), target):
            await Mover(stores, map_, on_step=on_step).run(change)


if __name__ == "__main__":
    asyncio.run(move(*sys.argv[1:]))
