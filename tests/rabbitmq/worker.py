"""An application whose workers are killed: `millpond run tests.rabbitmq.worker`.

Each run of the handler writes a line: the number of the message and its deliveries. The environment has the URL and the
file.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from millpond import Delivery, Millpond

URL, FILE = "KILLED_WORKER_URL", "KILLED_WORKER_FILE"
pond = Millpond(os.environ.get(URL, "memory://"))


def note(line: str) -> None:
    with Path(os.environ[FILE]).open("a") as lines:
        lines.write(line)


@pond.subscriber("q", max_workers=4)
async def handle(number: str, delivery: Delivery) -> None:
    note(f"{number} {delivery.claim.deliveries}\n")
    if number == "poison":
        os._exit(1)
    await asyncio.sleep(0.01)
