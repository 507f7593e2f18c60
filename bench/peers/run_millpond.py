"""Millpond with default options, archive on."""

import asyncio

from contest import BODY, Contest, main

from millpond import Millpond


async def drain(url: str, contest: Contest) -> None:
    pond = Millpond(url, migrate=True)
    for start in range(0, contest.count, 5000):
        await pond.publish_many("bench", [BODY] * min(5000, contest.count - start))
    await _work(pond, contest, timed=False)


async def latency(url: str, contest: Contest) -> None:
    pond = Millpond(url, migrate=True)
    async with Millpond(url, migrate=True) as publisher:
        working = asyncio.create_task(_work(pond, contest, timed=True))
        await asyncio.sleep(2)
        await contest.publish_slowly(lambda body: publisher.publish("bench", body))
        await working


async def _work(pond: Millpond, contest: Contest, timed: bool) -> None:
    @pond.subscriber("bench")
    async def handle(body: dict) -> None:
        contest.handled(body["at"] if timed else None)

    running = asyncio.create_task(pond.run(signals=False))
    done = asyncio.create_task(contest.done.wait())
    await asyncio.wait([running, done], return_when=asyncio.FIRST_COMPLETED)
    pond.stop()
    await running
    await pond.close()


main(drain, latency)
