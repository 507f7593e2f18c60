"""Export: what was archived since the last one, of every shard, as one commit of the lake.

    1. open the lake, which fences whoever wrote before, and enter it in each database, so that purge waits for it
    2. close a stretch of each archive: nothing will appear in it any more
    3. executors fetch it and write Parquet files
    4. commit: the files, and how far each shard was exported, are one entry of the lake's log
    5. note in each database what the lake holds now

Whatever dies, wherever: before 4 nothing has happened but orphan files, and after it 5 is done by the next export.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from millpond.spark.lake.body import INFER, SAMPLE, Decoder, given, inferred
from millpond.spark.lake.manifest import Lake
from millpond.spark.lake.tasks import written_by_tasks
from millpond.spark.lake.write import Work, export_slice
from millpond.spark.options import Options, Shard
from millpond.transports import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millpond.transports.database.exports import Closed
    from millpond.transports.database.store import DatabaseStore

T = TypeVar("T")

_SOME_CORES = 4
_STORE: dict[str, Any] = {"migrate": False, "pool_size": 1, "call_timeout": 3600}


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export has added to the lake."""

    rows: int
    files: int
    size: int
    until_us: Mapping[int, int]
    """Of each shard: everything archived before this moment is in the lake."""
    held: Sequence[int] = ()
    """Shards where a transaction that is not committed keeps back what was archived after it began."""


def export(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    schema: str | None = None,
    table_prefix: str = "",
    decode: str | None = None,
) -> Exported:
    """Bring a lake up to date with the archives of its databases; it is made if there is none.

    `url` names the database, or several as shards, separated by white space, in an order that must stay; without it
    MILLPOND_URL does. `decode` makes columns of JSON bodies: "sku bigint, price double", or "infer". What a lake has
    decoded once it goes on decoding.
    """

    def do() -> Exported:
        exporter = Exporter(spark, path, shards_of(url, schema, table_prefix), decode=decode)
        try:
            return exporter.export()
        finally:
            exporter.close()

    return beside_the_loop(do)


def shards_of(url: str | None, schema: str | None, table_prefix: str) -> list[Shard]:
    given = {"url": url, "schema": schema, "tablePrefix": table_prefix or None}
    return Options({name: value for name, value in given.items() if value is not None}, (), of="an export").shards()


def beside_the_loop(do: Callable[[], T]) -> T:
    """In this thread, or in one of its own where this one runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return do()
    with ThreadPoolExecutor(1, "millpond-lake") as pool:
        return pool.submit(do).result()


class Exporter:
    """The one who exports to a lake, once or again and again, until another one opens it."""

    def __init__(
        self,
        spark: SparkSession,
        path: str | os.PathLike[str],
        shards: Sequence[Shard],
        *,
        decode: str | None = None,
    ) -> None:
        self._spark = spark
        self._decode = decode
        self._shards = shards
        self._runner = asyncio.Runner()
        self._stores: list[DatabaseStore] = []
        self.lake = Lake.create(path)
        self._epoch = 0

    def export(self) -> Exported:
        self.opened()
        since = self.lake.state.until
        closed: list[Closed] = self._each(lambda store, shard: store.close_archive(since.get(shard.number)))
        until = {
            shard.number: max(one.until_us, since.get(shard.number, one.until_us))
            for shard, one in zip(self._shards, closed, strict=True)
        }
        works = self._plan(since, until)
        fields = self._new_fields(works)
        body = {**self.lake.state.body, **fields}
        do = partial(export_slice, decoder=Decoder(body) if body else None)
        files = written_by_tasks(self._spark, self.lake, do, works)
        if files:
            self.lake.commit("export", added=files, until=until, body=fields)
            self._note()
        return Exported(
            rows=sum(file.rows for file in files),
            files=len(files),
            size=sum(file.size for file in files),
            until_us=self.lake.state.until,
            held=[shard.number for shard, one in zip(self._shards, closed, strict=True) if one.held],
        )

    def purge(self, *, older_than: float | None = None) -> int:
        """Delete from the archives what retention, or this many seconds, allows and the lake holds."""
        self.opened()
        return sum(self._each(lambda store, _: store.purge(older_than=older_than)))

    def opened(self) -> Lake:
        """The lake, of which this is the one writer."""
        if self._epoch:
            return self.lake
        if not self._stores:
            self._stores = self._run(self._connect())
        epoch = self.lake.open()
        until = self.lake.state.until
        self._each(
            lambda store, shard: store.open_export(
                self.lake.id, shard=shard.number, path=str(self.lake.root), until=until.get(shard.number)
            )
        )
        self._epoch = epoch
        return self.lake

    def _plan(self, since: Mapping[int, int], until: Mapping[int, int]) -> list[Work]:
        from millpond.transports.database.fetch import check, closed

        # As many as there are cores, so that all of them work; over Spark Connect nobody tells how many.
        context = getattr(self._spark, "sparkContext", None)
        cores = _SOME_CORES if context is None else context.defaultParallelism
        parallel = max(1, cores // len(self._shards))
        found = []
        for shard in self._shards:
            if until[shard.number] == since.get(shard.number):
                continue
            with shard.fetcher() as fetcher:
                check(fetcher, shard.url)
                slices = closed.slices(fetcher, since.get(shard.number), until[shard.number], parallel)
            found += [Work(str(self.lake.root), self._epoch, shard, part) for part in slices]
        return found

    def _new_fields(self, works: Sequence[Work]) -> dict[str, str]:
        known = self.lake.state.body
        if self._decode is None:
            return {}
        return inferred(_sample(works), known) if self._decode == INFER else given(self._decode, known)

    def _note(self) -> None:
        until = self.lake.state.until
        self._each(lambda store, shard: store.note_export(self.lake.id, until[shard.number]))

    def _each(self, do: Callable[[DatabaseStore, Shard], Coroutine[Any, Any, T]]) -> list[T]:
        async def all_() -> list[T]:
            return await asyncio.gather(*map(do, self._stores, self._shards))

        return self._run(all_())

    async def _connect(self) -> list[Any]:
        return await asyncio.gather(*(connect(shard.url.raw, **shard.options, **_STORE) for shard in self._shards))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        stores, self._stores = self._stores, []
        for store in stores:
            self._run(store.close())
        self._runner.close()


def _sample(works: Sequence[Work]) -> Iterator[bytes]:
    """Some bodies of every slice."""
    from millpond.transports.database.fetch import Column, Kind

    payload = [Column("payload", Kind.BYTES, "payload")]
    for work in works:
        with work.shard.fetcher() as fetcher:
            batches = (batch for piece in work.slice for batch in fetcher.read(piece, payload))
            payloads = (payload for batch in batches for payload in batch.column(0).to_pylist())
            yield from islice(payloads, SAMPLE)
