"""FastStream's SQL broker with large fetches and a short flush interval."""

import asyncio

from contest import BODY, Contest, main
from faststream_sqlbroker import SqlBroker
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

# The tables as in its documentation.
TABLES = """
CREATE TYPE sqlbrokermessagestate AS ENUM ('PENDING', 'PROCESSING', 'RETRYABLE', 'FAILED', 'COMPLETED');
CREATE TABLE message (id BIGSERIAL PRIMARY KEY, queue VARCHAR(255) NOT NULL, headers JSON, payload BYTEA NOT NULL,
  state sqlbrokermessagestate NOT NULL, attempts_count BIGINT NOT NULL, deliveries_count BIGINT NOT NULL,
  created_at TIMESTAMP NOT NULL, first_attempt_at TIMESTAMP, next_attempt_at TIMESTAMP NOT NULL,
  last_attempt_at TIMESTAMP, acquired_at TIMESTAMP);
CREATE INDEX ON message (queue);
CREATE INDEX ON message (state);
CREATE INDEX ON message (next_attempt_at);
CREATE TABLE message_archive (id BIGINT PRIMARY KEY, queue VARCHAR(255) NOT NULL, headers JSON,
  payload BYTEA NOT NULL, state sqlbrokermessagestate NOT NULL, attempts_count BIGINT NOT NULL,
  deliveries_count BIGINT NOT NULL, created_at TIMESTAMP NOT NULL, first_attempt_at TIMESTAMP,
  last_attempt_at TIMESTAMP, archived_at TIMESTAMP NOT NULL);
CREATE INDEX ON message_archive (queue);
CREATE INDEX ON message_archive (state);
"""


async def _open(url: str) -> tuple[AsyncEngine, SqlBroker]:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=20)
    async with engine.begin() as connection:
        for statement in TABLES.split(";\n"):
            if statement.strip():
                await connection.execute(text(statement))
    return engine, SqlBroker(engine=engine, logger=None, validate_schema_on_start=False)


async def drain(url: str, contest: Contest) -> None:
    engine, broker = await _open(url)
    await broker.connect()
    for start in range(0, contest.count, 1000):
        await broker.publish_batch(*[BODY] * min(1000, contest.count - start), queue="bench")

    @broker.subscriber(
        queues=["bench"],
        max_workers=1,
        fetch_batch_size=500,
        max_fetch_interval=0.1,
        min_fetch_interval=0.001,
        flush_interval=0.05,
        max_not_processed_factor=3.0,
        max_not_persisted_factor=5.0,
    )
    async def handle(body: dict) -> None:
        contest.handled()

    await broker.start()
    await contest.done.wait()
    await broker.stop()
    await engine.dispose()


async def latency(url: str, contest: Contest) -> None:
    engine, broker = await _open(url)

    @broker.subscriber(
        queues=["bench"], max_workers=4, fetch_batch_size=10, max_fetch_interval=0.05, flush_interval=0.05
    )
    async def handle(body: dict) -> None:
        contest.handled(body["at"])

    await broker.start()
    await asyncio.sleep(2)
    await contest.publish_slowly(lambda body: broker.publish(body, queue="bench"))
    await contest.done.wait()
    await broker.stop()
    await engine.dispose()


main(drain, latency)
