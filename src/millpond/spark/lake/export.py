"""Export: all messages archived since the last export, from every shard, as one commit of the lake.

    1. read the lake's log once; enter the lake in each database: from then on purge waits for it
    2. close a range of each archive: no further message will appear in it
    3. executors read it and write Parquet files
    4. commit: the files and the progress of each shard are one entry of the lake's log
    5. record in each database the ranges that the lake holds, with their numbers of messages

After a crash before 4 there are only orphan files. After a crash after 4 the next export does 5, with numbers from the
lake. If another export commits between 1 and 4, this one begins again at 1. A shard that does not answer at 1 is left
to the next export: it delays its own messages only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from millpond.checks import integer
from millpond.clock import Seconds, seconds
from millpond.errors import LakeDamaged, LakeFenced, StoreUnavailable
from millpond.loop import gather_all, outside_loop
from millpond.seam.arrow import Column, Kind
from millpond.spark.lake.body import INFER, SAMPLE, Decoder, infer_fields, parse_fields
from millpond.spark.lake.export_task import RedactBody, SliceExported, Work, export_slice, redacted
from millpond.spark.lake.files import Progress
from millpond.spark.lake.on_executors import check_written, run_on_executors
from millpond.spark.lake.ranges import pieces
from millpond.spark.lake.storage import Storage, storage_of
from millpond.spark.lake.table import Began, Lake, LakeChanged
from millpond.spark.lake.writers import file_schema
from millpond.spark.options import SparkOptions, SparkShard
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millpond.seam.exports import ClosedUntil
    from millpond.seam.transport import Transport

T = TypeVar("T")

MARGIN = 60.0
"""Seconds before now at which an export ends. A failover to a clock that is behind by less loses nothing."""
LONGEST_WAIT = 60.0
"""Seconds that an export over several shards waits for one that accepts its call and does not answer."""
_TRIES = 5
_SOME_CORES = 4


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export."""

    rows: int
    files: int
    size: int
    until_us: Mapping[int, int]
    """Shard -> time before which all archived messages are in the lake."""
    held: Sequence[int] = ()
    """Shards where an open transaction holds back messages that were archived after it began."""
    away: Mapping[int, str] = {}
    """Shard that did not answer -> the error. The next export takes its messages."""
    margin: float = 0.0
    """Age in seconds of the youngest exported messages."""


def export(
    spark: SparkSession,
    path: str | os.PathLike[str],
    url: str | None = None,
    *,
    schema: str | None = None,
    table_prefix: str = TABLE_PREFIX,
    decode: str | None = None,
    redact: RedactBody | None = None,
    margin: Seconds | None = None,
    connections: int | None = None,
    pooler: bool = False,
    storage_options: Mapping[str, str] | None = None,
) -> Exported:
    """Bring a lake up to date with the archives of its databases; it is created if missing.

    `url` names the database, or several as shards, separated by white space, in an order that must not change; the
    default is MILLPOND_URL. `decode` makes columns from JSON bodies: "sku bigint, price double", or "infer". A lake
    keeps decoding the fields it has once decoded. `redact(queue, body)` returns the body for the lake; a body for which
    it fails is empty there. `margin` is the age of the youngest exported messages; the default is a minute.
    `connections` is the maximum number of connections of executors to the databases; `pooler` is true if they pass a
    pooler in transaction mode. `storage_options` are those of `deltalake` for object stores.
    """

    def do() -> Exported:
        shards, storage = shards_of(url, schema, table_prefix, pooler=pooler), storage_of(path, storage_options)
        given: dict[str, Any] = {"decode": decode, "redact": redact, "margin": margin, "connections": connections}
        exporter = Exporter(spark, storage, shards, **given)
        try:
            return exporter.export()
        finally:
            exporter.close()

    return outside_loop(do)


def shards_of(url: str | None, schema: str | None, table_prefix: str, *, pooler: bool = False) -> list[SparkShard]:
    given = {"url": url, "schema": schema, "tablePrefix": table_prefix, "pooler": "true" if pooler else None}
    return SparkOptions(
        {name: value for name, value in given.items() if value is not None}, (), of="an export"
    ).shards()


class Exporter:
    """Exports to a lake, once or repeatedly."""

    store_options: Mapping[str, Any] = {"migrate": False, "pool_size": 1, "call_timeout": 3600}

    def __init__(
        self,
        spark: SparkSession,
        storage: Storage,
        shards: Sequence[SparkShard],
        *,
        decode: str | None = None,
        redact: RedactBody | None = None,
        margin: Seconds | None = None,
        connections: int | None = None,
    ) -> None:
        self.storage = storage
        self._spark = spark
        self._decode = decode
        self._redact = redact
        self._margin = MARGIN if margin is None else margin
        self._connections = None if connections is None else integer(connections, "connections", 1)
        self._shards = shards
        self._runner = asyncio.Runner()
        self._stores: dict[int, Transport] = {}
        self.away: dict[int, StoreUnavailable] = {}
        """Shards that did not answer when the lake was opened last."""

    def export(self) -> Exported:
        for _ in range(_TRIES):
            try:
                return self._export(self.open())
            except LakeChanged as e:
                last = e
        raise LakeFenced(
            f"other exports or changes of the lake {self.storage.root} came first {_TRIES} times, and this one has "
            f"committed nothing. Run one export of a database at a time. The last answer: {last}"
        )

    def _export(self, lake: Lake) -> Exported:
        began = Began()
        since = {shard.number: lake.until(shard.number) for shard in self._present}
        closed: dict[int, ClosedUntil] = self._each(
            lambda store, shard: store.exports.close_archive(since[shard.number], margin=self._margin)
        )
        until = {number: one.until_us for number, one in closed.items()}
        works = self._plan(since, until)
        until = {shard.number: until[shard.number] for shard in self._present}
        if fields := self._new_fields(works, lake.body):
            lake.add_fields(fields)
        decoder = Decoder(lake.body) if lake.body else None
        do = partial(export_slice, storage=self.storage, decoder=decoder, redact=self._redact)
        done = run_on_executors(self._spark, do, works, SliceExported, at_once=self._connections)
        files = [file for one in done for file in one.files]
        check_written(self.storage, files)
        began.check()
        if files:
            by_minute = {number: _sum(one.by_minute for one in done if one.shard == number) for number in until}
            counts = {number: sum(rows.values()) for number, rows in by_minute.items()}
            progress = {number: Progress(since[number], time, counts[number]) for number, time in until.items()}
            lake.export(files, progress)
            self._each(
                lambda store, shard: store.exports.advance(
                    lake.id, pieces(since[shard.number], until[shard.number], by_minute[shard.number])
                )
            )
        found = {shard.number: lake.until(shard.number) for shard in self._shards}
        return Exported(
            rows=sum(file.rows for file in files),
            files=len(files),
            size=sum(file.size for file in files),
            until_us={number: time for number, time in found.items() if time is not None},
            held=[number for number, one in closed.items() if one.held],
            away={number: str(error) for number, error in self.away.items()},
            margin=seconds(self._margin),
        )

    def purge(self, *, older_than: float | None = None) -> int:
        """Delete archived messages that the lake holds and that retention, or an age in seconds, allows."""
        self.open()
        return sum(self._each(lambda store, _: store.operations.purge(older_than=older_than)).values())

    def open(self) -> Lake:
        """The lake as its log shows it now, created if missing, and entered in the databases that answer."""
        self.away = {}
        self._run(self._connect())
        before = None
        while True:
            lake = Lake.create(self.storage, file_schema(None))
            try:
                self._enter(lake)
            except LakeDamaged:
                # The databases know more than the log had: another export has committed since, or the log is damaged.
                if lake.version == before:
                    raise
                before = lake.version
            else:
                return lake

    def _enter(self, lake: Lake) -> None:
        async def enter(store: Transport, shard: SparkShard) -> None:
            until = lake.until(shard.number)
            place: dict[str, Any] = {"shard": shard.number, "path": self.storage.root, "until": until}
            try:
                async with asyncio.timeout(LONGEST_WAIT if len(self._shards) > 1 else None):
                    recorded = await store.exports.open(lake.id, **place)
            except StoreUnavailable as e:
                self.away[shard.number] = e
            except TimeoutError:
                self.away[shard.number] = StoreUnavailable(f"{shard.url} did not answer within {LONGEST_WAIT:g} s")
            else:
                await self._catch_up(store, lake, shard.number, recorded)

        self._each(enter)
        self._check_any_present()

    async def _catch_up(self, store: Transport, lake: Lake, shard: int, recorded: int | None) -> None:
        """Record ranges that an export has committed before it died."""
        until = lake.until(shard)
        if until is not None and (recorded is None or recorded < until):
            await asyncio.to_thread(lake.sync)
            by_minute = await asyncio.to_thread(lake.count_by_minute, shard, recorded, until)
            await store.exports.advance(lake.id, pieces(recorded, until, by_minute))

    def _plan(self, since: Mapping[int, int | None], until: Mapping[int, int]) -> list[Work]:
        # One slice per core. The number of cores is unknown over Spark Connect.
        context = getattr(self._spark, "sparkContext", None)
        cores = _SOME_CORES if context is None else context.defaultParallelism
        parallel = max(1, min(cores, self._connections or cores) // len(self._present))
        found = []
        for shard in self._present:
            if until[shard.number] == since[shard.number]:
                continue
            try:
                with shard.open_reader() as reader:
                    reader.check()
                    slices = reader.closed_slices(since[shard.number], until[shard.number], parallel)
            except StoreUnavailable as e:  # it may have no connection left for a reader
                self.away[shard.number] = e
            else:
                found += [Work(shard, part) for part in slices]
        self._check_any_present()
        return found

    def _new_fields(self, works: Sequence[Work], known: Mapping[str, str]) -> dict[str, str]:
        if self._decode is None:
            return {}
        return (
            infer_fields(_sample(works, self._redact), known)
            if self._decode == INFER
            else parse_fields(self._decode, known)
        )

    @property
    def _present(self) -> list[SparkShard]:
        return [shard for shard in self._shards if shard.number not in self.away]

    def _check_any_present(self) -> None:
        if not self._present:
            raise next(iter(self.away.values()))

    def _each(self, do: Callable[[Transport, SparkShard], Coroutine[Any, Any, T]]) -> dict[int, T]:
        """Shard -> result, for all shards that are not away."""

        async def all_() -> dict[int, T]:
            shards = self._present
            found = await gather_all(do(self._stores[shard.number], shard) for shard in shards)
            return {shard.number: one for shard, one in zip(shards, found, strict=True)}

        return self._run(all_())

    async def _connect(self) -> None:
        """Connect to each shard. Those that do not answer are away; after any other error the new ones are closed."""
        missing = [shard for shard in self._shards if shard.number not in self._stores]
        found = await asyncio.gather(
            *(connect(shard.url.raw, **shard.store_options, **self.store_options) for shard in missing),
            return_exceptions=True,
        )
        stores: dict[int, Transport] = {}
        wrong: BaseException | None = None
        for shard, result in zip(missing, found, strict=True):
            if isinstance(result, StoreUnavailable):
                self.away[shard.number] = result
            elif isinstance(result, BaseException):
                wrong = wrong or result
            else:
                stores[shard.number] = result
        if wrong is not None:
            await asyncio.gather(*(store.close() for store in stores.values()), return_exceptions=True)
            raise wrong
        self._stores |= stores
        self._check_any_present()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        async def all_() -> None:
            await gather_all(store.close() for store in stores.values())

        stores, self._stores = self._stores, {}
        try:
            self._run(all_())
        finally:
            self._runner.close()


def _sum(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for one in counts:
        for minute, rows in one.items():
            total[minute] = total.get(minute, 0) + rows
    return total


def _sample(works: Sequence[Work], redact: RedactBody | None) -> Iterator[bytes]:
    """The first bodies of every slice."""
    columns = [Column("queue", Kind.TEXT, "queue"), Column("payload", Kind.BYTES, "{body}")]
    for work in works:
        with work.shard.open_reader() as reader:
            batches = reader.read(work.slice, columns)
            redacted_batches = batches if redact is None else (redacted(batch, redact) for batch in batches)
            payloads = (payload for batch in redacted_batches for payload in batch.column(1).to_pylist())
            yield from islice(payloads, SAMPLE)
