"""The Delta table of a lake, at one version of its log.

A commit adds the files of an export and its progress: one application transaction for each shard, whose version is the
time before which the lake holds all archived messages of that shard. Application transactions alone fence nothing.
Therefore an export plans and commits with one `Lake`, which does not move on by itself: `deltalake` refuses the commit
if another one has moved the same shard since, and the export plans anew.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from math import ceil
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.clock import SECOND, SystemClock, as_datetime, monotonic
from millpond.errors import LakeDamaged, LakeError, MissingDriver, NoLake
from millpond.spark.lake.files import MILLISECOND, STATISTICS, File, Progress, add_action
from millpond.spark.lake.ranges import MINUTE
from millpond.spark.lake.storage import Storage, check_path

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, Field, PostCommitHookProperties

LAKE = "millpond.lake"
"""Property of the table with the lake's id, which the databases know."""
OLD_LOG = "_millpond"
KEEP = timedelta(days=7)
"""Files that were replaced, or written and not committed, are deleted after this time: longer than any export."""
LONGEST = KEEP / 2
"""The longest time from the first file of an export or a compaction to its commit."""
_WRITTEN = re.compile(r"day=[^/]+/[^/]+\.parquet")
"""Files that writers of the table make. Others in its folder belong to somebody else."""
_CHECKPOINT_EVERY = 32
"""Commits between two checkpoints."""
_PROPERTIES = {
    # Statistics in the log, by which readers leave out files.
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    # An export commits against the entries since it began. Without time travel no older ones are needed.
    "delta.logRetentionDuration": f"interval {ceil(LONGEST / timedelta(hours=1)) + 1} hours",
    "delta.deletedFileRetentionDuration": f"interval {KEEP.days} days",
}
_OURS = {"id", "queue", "state", "payload", "archived_at", "shard"}
"""Some of the columns by which a lake differs from another program's table: exports would spoil that one."""
NOTHING = -(2**63)
_TYPES = {"boolean": "boolean", "bigint": "long", "double": "double", "string": "string"}
"""Type of a decoded field, by Spark's name in SQL -> by Delta's name."""


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"\d+: \S+|at \S+")


class Chosen(msgspec.Struct, frozen=True):
    """Chooses messages: of one of the queues, archived on the day and in [since, until). Empty: all of them."""

    queues: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None
    day: date | None = None

    def filters(self) -> list[tuple[str, str, Any]] | None:
        # As values, not as text of SQL: a queue may have any name.
        found: list[tuple[str, str, Any]] = []
        if self.day is not None:
            found.append(("day", "=", self.day))
        if self.since is not None:
            found += [("day", ">=", self.since.astimezone(UTC).date()), ("archived_at", ">=", self.since)]
        if self.until is not None:
            found += [("day", "<=", self.until.astimezone(UTC).date()), ("archived_at", "<", self.until)]
        if self.queues:
            found.append(("queue", "in", list(self.queues)))
        return found or None


class LakeChanged(LakeError):
    """Another commit came first. This one was not written; plan anew."""


class Began:
    """When work began that writes files. A compaction deletes them if no commit has named them for long."""

    def __init__(self) -> None:
        self._monotonic, self._wall_us = monotonic(), SystemClock().now()

    def check(self) -> None:
        """Raise if the first files may be gone soon. By two clocks: one stands still while the machine is suspended."""
        passed = max(monotonic() - self._monotonic, (SystemClock().now() - self._wall_us) / SECOND)
        if passed > LONGEST.total_seconds():
            raise LakeChanged(
                f"the export or compaction took more than {LONGEST // timedelta(hours=1)} hours, and its first files "
                "may be deleted; nothing was committed, run it again"
            )


@contextlib.contextmanager
def _translated(storage: Storage) -> Iterator[None]:
    """Errors of the log or of the store, as ours."""
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

    try:
        yield
    except TableNotFoundError:
        raise NoLake(_no_lake(storage)) from None
    except CommitFailedError as e:
        raise LakeChanged(str(e)) from None
    except (DeltaError, OSError) as e:
        raise LakeError(
            f"the lake {storage.root} could not be read or written: {_plain(e)}; if a commit was under way, the next "
            "export finds out whether it was written"
        ) from None


def _plain(error: Exception) -> str:
    """The text of an error of `deltalake` as one line, without colours and frames of a trace."""
    lines = (line.strip(" \u21b3") for line in _COLOUR.sub("", str(error)).splitlines())
    return "; ".join(line for line in lines if line and not _FRAME.fullmatch(line))


class Lake:
    """A lake as its log showed it when this object was made."""

    def __init__(self, storage: Storage, table: DeltaTable) -> None:
        self.storage = storage
        self._table = table

    @classmethod
    def open(cls, storage: Storage, *, migrating: bool = False) -> Lake:
        """The lake in this place. One in the format of an earlier version is refused until its migration has ended."""
        delta = _deltalake()
        if not migrating and has_old_log(storage):
            raise NoLake(_no_lake(storage))
        with _translated(storage):
            table = delta.DeltaTable(storage.root, storage_options=_options(storage))
        if table.metadata().partition_columns != ["day"] or not {one.name for one in table.schema().fields} >= _OURS:
            raise NoLake(f"{storage.root} is a Delta table of another program, and no lake: choose another place")
        return cls(storage, table)

    @classmethod
    def create(cls, storage: Storage, schema: pa.Schema, *, id_: str | None = None, migrating: bool = False) -> Lake:
        """The lake in this place, created if missing."""
        try:
            return cls.open(storage, migrating=migrating)
        except NoLake:
            if has_old_log(storage) and not migrating:
                raise
        storage.prepare()
        delta = _deltalake().DeltaTable
        try:
            with _translated(storage):
                delta.create(
                    storage.root,
                    schema,
                    mode="error",
                    partition_by=["day"],
                    configuration=_PROPERTIES | ({LAKE: id_} if id_ else {}),
                    storage_options=_options(storage),
                    raise_if_key_not_exists=False,
                )
        except LakeError as e:
            with _translated(storage):
                there = delta.is_deltatable(storage.root, _options(storage))
            if not there:  # otherwise another process has created it
                why = "" if isinstance(e, NoLake) else f": {e}"
                raise LakeError(
                    f"the lake {storage.root} could not be created; check that its place exists and is writable{why}"
                ) from None
        lake = cls.open(storage, migrating=migrating)
        storage.sync_log([_entry(0)])
        return lake

    # --- read ---------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        metadata = self._table.metadata()
        return str(metadata.configuration.get(LAKE) or metadata.id)

    @property
    def version(self) -> int:
        return self._table.version()

    def until(self, shard: int) -> int | None:
        """Time of the shard's clock before which the lake holds all archived messages; None: none of this shard."""
        with _translated(self.storage):
            return self._table.transaction_version(_application(shard))

    @property
    def body(self) -> dict[str, str]:
        """Decoded fields of bodies, with their types."""
        names = {delta: name for name, delta in _TYPES.items()}
        for field in json.loads(self._table.schema().to_json())["fields"]:
            if field["name"] == "body":
                try:
                    return {one["name"]: names[one["type"]] for one in field["type"]["fields"]}
                except (KeyError, TypeError):
                    raise LakeDamaged(
                        f"the column 'body' of the lake {self.storage.root} is not one of Millpond's: another program "
                        "has changed the table; restore its log, or export to a new lake"
                    ) from None
        return {}

    def paths(self, chosen: Chosen | None = None) -> list[str]:
        """The files that may hold the chosen messages, relative to the lake."""
        filters = None if chosen is None else chosen.filters()
        with _translated(self.storage):
            uris = self._table.file_uris(file_pruning_predicate=filters)
        return sorted(self._relative(uri) for uri in uris)

    def _relative(self, uri: str) -> str:
        root = f"{self._table.table_uri.removeprefix('file://').rstrip('/')}/"
        return check_path(uri.removeprefix("file://").removeprefix(root))

    def sizes(self) -> Iterator[tuple[str, str, int]]:
        """Path, day and size of each file. Those that another program added without a day are left out."""
        import pyarrow as pa

        with _translated(self.storage):
            actions = pa.table(self._table.get_add_actions(flatten=True))
        columns = (actions.column(name).to_pylist() for name in ("path", "partition.day", "size_bytes"))
        for path, day, size in zip(*columns, strict=True):
            if day is not None:
                yield check_path(path), f"{day:%Y-%m-%d}", size

    def unused(self, hours: int) -> list[str]:
        """Files that no commit needs: replaced, or written and never committed, this long ago."""
        with _translated(self.storage):
            found = self._table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
        return [path for path in found if _WRITTEN.fullmatch(path)]

    def count_by_minute(self, shard: int, since: int | None, until: int) -> dict[int, int]:
        """The number of a shard's messages archived in [since, until), by minute since 1970."""
        import pyarrow as pa
        from deltalake import QueryBuilder

        low = "" if since is None else f"AND archived_at >= '{as_datetime(since).isoformat()}'"
        text = f"""
            SELECT date_trunc('minute', archived_at), count(*) FROM lake
            WHERE shard = {int(shard)} {low} AND archived_at < '{as_datetime(until).isoformat()}' GROUP BY 1
        """
        with _translated(self.storage):
            found = pa.table(QueryBuilder().register("lake", self._table).execute(text))
        minutes = found.column(0).cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_pylist()
        return {us // MINUTE: rows for us, rows in zip(minutes, found.column(1).to_pylist(), strict=True)}

    # --- write --------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Put the entries since the last checkpoint on disk: a process that was killed may have left them in memory."""
        last = self.version // _CHECKPOINT_EVERY * _CHECKPOINT_EVERY
        self.storage.sync_log(map(_entry, range(last, self.version + 1)))

    def add_fields(self, fields: Mapping[str, str]) -> None:
        """Add decoded fields to the table's schema; this object then shows the table with them."""
        from deltalake import Field
        from deltalake.schema import PrimitiveType

        columns = [_body(fields)]
        if not self.body:
            columns.append(Field("unreadable", PrimitiveType("string")))
        before = self.version
        with _translated(self.storage):
            self._table.alter.add_columns(columns, post_commithook_properties=_no_checkpoint())
        self._after(before)

    def export(self, files: Sequence[File], progress: Mapping[int, Progress]) -> None:
        """Commit the files of an export together with its progress, all or nothing."""
        for shard, range_ in progress.items():
            if self.until(shard) != range_.since:
                raise LakeChanged(f"shard {shard} was not planned from the progress that the log has")
        facts = [{"shard": shard, **msgspec.to_builtins(range_)} for shard, range_ in progress.items()]
        until = {_application(shard): range_.until for shard, range_ in progress.items()}
        self._commit([add_action(file) for file in files], {"millpond.export": facts}, until)
        for application, time in until.items():
            if (self._table.transaction_version(application) or NOTHING) < time:
                raise LakeDamaged(f"the commit of an export is not in the log of the lake {self.storage.root}")

    def replace(self, removed: Sequence[tuple[str, str, int]], added: Sequence[File]) -> None:
        """Commit the merged files in place of the small ones, given by path, day and size.

        `deltalake` does not check whether another commit has removed the same files. So this one is written only as
        the next version after the one in which they were seen.
        """
        from deltalake.transaction import RemoveAction

        missing = {path for path, _, _ in removed} - {path for path, _, _ in self.sizes()}
        if missing:
            raise LakeChanged(f"{len(missing)} files that were merged have been replaced by another process")
        now = SystemClock().now() // MILLISECOND
        gone = [RemoveAction(path, False, now, size, {"day": day}) for path, day, size in removed]
        actions = [*(add_action(file, data_change=False) for file in added), *gone]
        self._commit(actions, {"millpond.compact": {"replaced": len(gone), "by": len(added)}}, {}, retries=0)

    def _commit(
        self, actions: Sequence[Any], facts: Mapping[str, Any], until: Mapping[str, int], *, retries: int | None = None
    ) -> None:
        from deltalake import CommitProperties, Transaction

        properties = CommitProperties(
            custom_metadata=dict(facts),
            max_commit_retries=retries,
            app_transactions=[Transaction(application, time) for application, time in until.items()],
        )
        before = self.version
        with _translated(self.storage):
            self._table.create_write_transaction(
                list(actions),
                "append",
                self._table.schema(),
                ["day"],
                commit_properties=properties,
                post_commithook_properties=_no_checkpoint(),
            )
        self._after(before)

    def _after(self, before: int) -> None:
        """Show the newest version, with its log on disk. The entry before may be of a process that died unsynced."""
        with _translated(self.storage):
            self._table.update_incremental()
        self.storage.sync_log(map(_entry, range(before, self.version + 1)))
        if self.version // _CHECKPOINT_EVERY > before // _CHECKPOINT_EVERY:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Write all entries as one file, then delete old ones. `deltalake` would delete them before it is on disk."""
        with _translated(self.storage):
            self._table.create_checkpoint()
        self.storage.sync_log([f"{self.version:020}.checkpoint.parquet", "_last_checkpoint"])
        with _translated(self.storage):
            self._table.cleanup_metadata()


def _entry(version: int) -> str:
    return f"{version:020}.json"


def _no_checkpoint() -> PostCommitHookProperties:
    from deltalake import PostCommitHookProperties

    return PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


def has_old_log(storage: Storage) -> bool:
    """Whether there is a lake in the format of earlier versions."""
    import os

    return os.path.exists(os.path.join(storage.root, OLD_LOG, "lake.json"))


def _no_lake(storage: Storage) -> str:
    if has_old_log(storage):
        return (
            f"the lake {storage.root} has the format of an earlier version; convert it with: "
            f"millpond lake migrate --lake {storage.root}"
        )
    return f"there is no lake in {storage.root}; make one with: millpond lake export --lake {storage.root}"


def _application(shard: int) -> str:
    return f"millpond-shard-{shard}"


def _body(fields: Mapping[str, str]) -> Field:
    from deltalake import Field

    inner = [{"name": n, "type": _TYPES[type_], "nullable": True, "metadata": {}} for n, type_ in fields.items()]
    body = {"name": "body", "type": {"type": "struct", "fields": inner}, "nullable": True, "metadata": {}}
    return Field.from_json(json.dumps(body))


def _options(storage: Storage) -> dict[str, str] | None:
    return None if storage.options is None else dict(storage.options)


def _deltalake() -> Any:
    try:
        import deltalake
    except ModuleNotFoundError:
        raise MissingDriver(
            'a lake needs the package deltalake; install it with: pip install "millpond[spark]"'
        ) from None
    return deltalake
