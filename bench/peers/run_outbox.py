"""faststream-outbox with large fetches and batched final writes."""

import asyncio

from contest import BODY, Contest, main
from faststream_outbox import OutboxBroker, make_outbox_table
from sqlalchemy import MetaData
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

metadata = MetaData()
table = make_outbox_table(metadata, table_name="outbox")


async def _open(url: str) -> tuple[AsyncEngine, OutboxBroker]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=20)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    return engine, OutboxBroker(engine, outbox_table=table, logger=None)


async def drain(url: str, contest: Contest) -> None:
    engine, broker = await _open(url)
    sessions = async_sessionmaker(engine)
    for start in range(0, contest.count, 1000):
        async with sessions() as session, session.begin():
            bodies = [BODY] * min(1000, contest.count - start)
            await broker.publish_batch(*bodies, queue="bench", session=session)

    @broker.subscriber("bench", max_workers=1, fetch_batch_size=500, terminal_flush_batch_size=500)
    async def handle(body: dict) -> None:
        contest.handled()

    await broker.start()
    await contest.done.wait()
    await broker.stop()
    await engine.dispose()


async def latency(url: str, contest: Contest) -> None:
    engine, broker = await _open(url)
    sessions = async_sessionmaker(engine)

    @broker.subscriber("bench", max_workers=4)
    async def handle(body: dict) -> None:
        contest.handled(body["at"])

    async def publish(body: dict[str, object]) -> None:
        async with sessions() as session, session.begin():
            await broker.publish(body, queue="bench", session=session)

    await broker.start()
    await asyncio.sleep(2)
    await contest.publish_slowly(publish)
    await contest.done.wait()
    await broker.stop()
    await engine.dispose()


main(drain, latency)
