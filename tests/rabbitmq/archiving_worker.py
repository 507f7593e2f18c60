"""A worker with an archive: `python -m tests.rabbitmq.archiving_worker URL ARCHIVE COUNT [killed]`.

With `killed` it kills itself after its first record, before the ack. Otherwise it handles COUNT messages and prints
their numbers of deliveries.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from millpond import Delivery, Millpond


async def main(url: str, archive: str, count: int, killed: bool) -> None:
    pond = Millpond(url, archive=archive)

    seen = set()

    @pond.subscriber("q", max_workers=8)
    async def handle(number: str, delivery: Delivery) -> None:
        print(delivery.claim.deliveries)
        seen.add(number)
        if len(seen) == count:
            pond.stop()

    transport: Any = await pond.transport
    record = transport._inner.archive.operations.record

    async def record_and_die(rows: Any) -> None:
        await record(rows)
        os.kill(os.getpid(), signal.SIGKILL)

    if killed:
        transport._inner.archive.operations.record = record_and_die
    await pond.run()
    await pond.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["killed"]))
