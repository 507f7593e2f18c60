"""Numbers of messages at the broker, as far as AMQP reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.message import State
from millpond.seam.operations import Operations, QueueStats
from millpond.transports.rabbitmq.broker_errors import NoSuchQueue
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.connections import ConnectionPool
from millpond.transports.rabbitmq.names import amqp_name, dead_name, suspects_name


async def count_queues(
    pool: ConnectionPool, archive: Operations | None, queues: Sequence[str], held: Mapping[str, int], *, exact: bool
) -> list[QueueStats]:
    """Messages that are ready, and dead letters. Claimed and delayed ones are not reported: those states are missing.

    `held`: dead letters that are in this process. With an archive: its COMPLETED messages.
    """
    depths = Depths(pool)
    try:
        found = [
            QueueStats(
                queue=queue,
                counts={
                    State.PENDING: await depths.ready(amqp_name(queue)) + await depths.ready(suspects_name(queue)),
                    State.FAILED: await depths.ready(dead_name(queue)) + held.get(queue, 0),
                },
            )
            for queue in queues
        ]
    finally:
        await depths.close()
    return found if archive is None else _with_completed(found, await archive.count(queues, exact=exact))


def _with_completed(found: Sequence[QueueStats], archived: Sequence[QueueStats]) -> list[QueueStats]:
    return [
        QueueStats(
            queue=broker.queue,
            counts={**broker.counts, State.COMPLETED: archive.counts[State.COMPLETED]},
            approximate=archive.approximate,
            keep_completed_us=archive.keep_completed_us,
            keep_failed_us=archive.keep_failed_us,
        )
        for broker, archive in zip(found, archived, strict=True)
    ]


class Depths:
    """Asks on a separate channel, which the broker closes if a queue is missing."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._channel: Channel | None = None

    async def ready(self, name: str) -> int:
        if self._channel is None or self._channel.closed:
            self._channel = await self._pool.channel()
        try:
            return await self._channel.find_queue(name)
        except NoSuchQueue:
            self._channel.mark_dead()
            return 0

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
