"""pgqueuer with its best settings: asyncpg, uvloop, large batches."""

import asyncio
import json

import asyncpg
import uvloop
from contest import BODY, Contest, main
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


async def drain(url: str, contest: Contest) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    payload = json.dumps(BODY).encode()
    for start in range(0, contest.count, 5000):
        n = min(5000, contest.count - start)
        await queries.enqueue(["bench"] * n, [payload] * n, [0] * n)
    await _work(url, contest, timed=False)
    await connection.close()


async def latency(url: str, contest: Contest) -> None:
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    working = asyncio.create_task(_work(url, contest, timed=True))
    await asyncio.sleep(2)
    await contest.publish_slowly(lambda body: queries.enqueue("bench", json.dumps(body).encode()))
    await working
    await connection.close()


async def _work(url: str, contest: Contest, timed: bool) -> None:
    connection = await asyncpg.connect(url)
    queue = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint("bench")
    async def handle(job) -> None:
        body = json.loads(job.payload)
        contest.handled(body["at"] if timed else None)

    running = asyncio.create_task(queue.run(batch_size=500))
    await contest.done.wait()
    queue.shutdown.set()
    await running
    await connection.close()


main(drain, latency)
