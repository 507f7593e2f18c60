"""A worker that claims and never settles, until it dies. It prints a line at its first claim.

With the argument `moving` it dies by itself, between the publish of a suspect's copy and the ack. If it moves none, it
ends after some claims.
"""

import asyncio
import os
import sys
from typing import Any

import millpond


async def main(url: str, how: str = "") -> None:
    transport: Any = await millpond.connect(url)
    if how == "moving":
        send = transport._republisher._send

        async def die(messages: Any) -> None:
            await send(messages)
            os._exit(1)

        transport._republisher._send = die
    is_first = True
    for _ in range(20 if how else sys.maxsize):
        claims = await transport.claim(["q"], 50)
        if claims and is_first:
            print("claimed", flush=True)
            is_first = False
        await transport.wait(["q"], 0.05)
    os._exit(2)


asyncio.run(main(*sys.argv[1:]))
