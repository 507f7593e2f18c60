"""A broker that is short of memory or disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from millpond import Message
from servers import RabbitMQ
from tests.rabbitmq.conftest import SOON


@contextlib.asynccontextmanager
async def alarm(broker: RabbitMQ, transport: Any, kind: str = "memory") -> AsyncIterator[None]:
    """The broker is short of memory or disk and blocks the transport's publishes."""
    setting, low, enough = {
        "memory": ("set_vm_memory_high_watermark", ("absolute", "1MB"), ("absolute", "2GB")),
        "disk": ("set_disk_free_limit", ("mem_relative", "100000"), ("10MB",)),
    }[kind]
    await asyncio.to_thread(broker.control, setting, *low)
    blocked = None
    try:
        while blocked is None or blocked.done() or not transport.publisher_pool.is_blocked:  # the alarm may be late
            blocked = asyncio.create_task(transport.publish([Message(queue="other", payload=b"")]))
            await asyncio.wait([blocked], timeout=1)
        yield
    finally:
        await asyncio.to_thread(broker.control, setting, *enough)
    await asyncio.wait_for(blocked, SOON)
