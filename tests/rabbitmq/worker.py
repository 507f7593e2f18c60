"""A worker in a process of its own, to be killed: `python -m tests.rabbitmq.worker URL FILE`.

Each run of a handler leaves a line before it ends: the message's number and how often it was delivered.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from millpond import Delivery, Millpond


async def main(url: str, file: Path) -> None:
    pond = Millpond(url)

    @pond.subscriber("q", max_workers=4)
    async def handle(number: str, delivery: Delivery) -> None:
        with file.open("a") as lines:
            lines.write(f"{number} {delivery.claim.deliveries}\n")
        if number == "poison":
            os._exit(1)
        await asyncio.sleep(0.01)

    await pond.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
