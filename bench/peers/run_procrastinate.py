"""procrastinate with a pool and many concurrent tasks."""

import asyncio

import procrastinate
from contest import BODY, Contest, main

CONCURRENCY = 50


def _app(url: str) -> procrastinate.App:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url, min_size=4, max_size=20))


async def drain(url: str, contest: Contest) -> None:
    app = _app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        handle = _handler(app, contest, timed=False)
        for start in range(0, contest.count, 1000):
            await handle.batch_defer_async(*[BODY] * min(1000, contest.count - start))
        await _work(app, contest)


async def latency(url: str, contest: Contest) -> None:
    app = _app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        handle = _handler(app, contest, timed=True)
        working = asyncio.create_task(_work(app, contest))
        await asyncio.sleep(2)
        await contest.publish_slowly(lambda body: handle.defer_async(**body))
        await working


def _handler(app: procrastinate.App, contest: Contest, timed: bool):
    @app.task(name="bench", queue="bench")
    async def handle(x: str, at: float | None = None) -> None:
        contest.handled(at if timed else None)

    return handle


async def _work(app: procrastinate.App, contest: Contest) -> None:
    running = asyncio.create_task(
        app.run_worker_async(queues=["bench"], concurrency=CONCURRENCY, install_signal_handlers=False)
    )
    await contest.done.wait()
    running.cancel()
    await asyncio.wait([running])


main(drain, latency)
