"""The work, through Millpond."""

from collections.abc import Sequence

from bench.side import ERROR, LEASE, PAYLOAD, QUEUE, delay, drain_overlapping, now
from millpond import Ack, Claim, Message, Nack, Transport, connect
from millpond.table_prefix import TABLE_PREFIX


class StoreSide:
    """The work of a program on a transport; the time includes `Message` and `Ack` objects."""

    def __init__(self, store: Transport) -> None:
        self._store = store

    async def publish(self, count: int, *, notify: bool = True) -> float:
        began = now()
        for _ in range(count):
            await self._store.publish([Message(queue=QUEUE, payload=PAYLOAD)])
        return now() - began

    async def publish_bulk(self, count: int, size: int) -> float:
        began = now()
        for _ in range(count // size):
            await self._store.publish([Message(queue=QUEUE, payload=PAYLOAD) for _ in range(size)])
        return now() - began

    async def drain(self, count: int, batch: int) -> float:
        async def claim() -> list[Claim]:
            return await self._store.claim([QUEUE], batch, LEASE)

        async def ack(claims: Sequence[Claim]) -> None:
            if await self._store.settle([Ack(claim.receipt) for claim in claims]):
                raise RuntimeError("a receipt was refused")

        return await drain_overlapping(claim, ack, count)

    async def nack(self, count: int, batch: int) -> float:
        claims = [await self._store.claim([QUEUE], batch, LEASE) for _ in range(count // batch)]
        began = now()
        for part in claims:
            if await self._store.settle([Nack(c.receipt, delay(n), ERROR) for n, c in enumerate(part)]):
                raise RuntimeError("a receipt was refused")
        return now() - began

    async def claim_all(self, count: int, batch: int) -> None:
        """Claim `count` messages and settle none."""
        for _ in range(count // batch):
            await self._store.claim([QUEUE], batch, 10 * LEASE)

    async def close(self) -> None:
        await self._store.close()


async def open_store(url: str, prefix: str = TABLE_PREFIX) -> StoreSide:
    return StoreSide(await connect(url, table_prefix=prefix, migrate=True))
