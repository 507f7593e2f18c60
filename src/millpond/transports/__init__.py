"""URLs to transports. This table alone maps schemes to backends; a backend is imported when it is used."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from millpond.errors import InvalidOption, MissingDriver, UnknownScheme, not_supported
from millpond.message import new_id
from millpond.seam.transport import Capability, Transport
from millpond.table_prefix import TABLE_PREFIX
from millpond.telemetry import Telemetry
from millpond.transports.url import Url

if TYPE_CHECKING:
    from millpond.seam.arrow import ArrowReader, ArrowWriter, PartWriter
    from millpond.seam.bulk import Batch
    from millpond.seam.shards import MapChange, MoveProgress, ShardStatus
    from millpond.seam.transactions import Transactions
    from millpond.transports.connect_options import ConnectOptions
    from millpond.transports.database.options import StoreOptions
    from millpond.transports.database.sql.dialect import Dialect
    from millpond.transports.database.store import DatabaseStore
    from millpond.transports.database.transactions import DatabaseTransactions
    from millpond.transports.shard_map import ShardMap, ShardRecord
    from millpond.transports.sharded.transactions import ShardedTransactions


class _Scheme(NamedTuple):
    module: str
    """Has `connect` and `check_address`; a database has `dialect`, others have `check_options`."""
    extra: str | None = None
    """Installs the driver."""
    is_database: bool = True
    is_shared: bool = True
    is_file: bool = False
    """A file of one machine."""
    options: str = "database.options.StoreOptions"
    """Struct of its options, in this package; so are the classes for Arrow access to a database."""
    reader: str = ""
    writer: str = "database.arrow.row_writer.RowWriter"
    part_writer: str | None = None


_POSTGRES = _Scheme(
    "millpond.transports.database.postgres.engine",
    "postgres",
    reader="database.postgres.reader.PostgresReader",
    writer="database.postgres.writer.PostgresWriter",
    part_writer="database.postgres.writer.PostgresPartWriter",
)
_MYSQL = _Scheme("millpond.transports.database.mysql.engine", "mysql", reader="database.mysql.reader.MysqlReader")
_SQLITE = _Scheme(
    "millpond.transports.database.sqlite.engine", is_file=True, reader="database.sqlite.reader.SqliteReader"
)
_RABBITMQ = _Scheme(
    "millpond.transports.rabbitmq", "rabbitmq", is_database=False, options="rabbitmq.options.RabbitOptions"
)
_SCHEMES = {
    "memory": _Scheme("millpond.transports.database.sqlite.memory", is_database=False, is_shared=False),
    "sqlite": _SQLITE,
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
}


Address = str | Sequence[str]
"""A URL, or those of the shards of one pond."""


async def connect(
    url: Address = "", *, telemetry: Telemetry | None = None, **options: Unpack[ConnectOptions]
) -> Transport:
    """Open a transport: `sqlite:///orders.db`, `postgresql://…`, `mysql://…`, `mariadb://…`, `amqp://…`, `memory://`.

    A list of databases is a pond of several shards, which `millpond shards init` has made.
    `telemetry` gets its events. The other options depend on the backend; an unknown one is an error. See
    docs/reference/options.md.
    """
    transport: Transport
    one = address(url)
    if isinstance(one, list):
        given = {**options}
        room = _sharded_transactions(one, given)
        transport = await _sharded().connect(_shard_urls(one), _connect_shard, room, given)
    else:
        parsed = Url(one)
        transport = await _backend(parsed).connect(parsed, **options)
    if telemetry is None:
        return transport
    from millpond.transports.instrumented import Instrumented  # only for programs that connect

    return Instrumented(transport, telemetry)


def check(url: Address, **options: Any) -> None:
    """Raise for a wrong URL or option, without connecting. Files that the URL names are not read."""
    one = address(url)
    if isinstance(one, list):
        urls = _shard_urls(one)
        given = _sharded().check_options(urls, options)
        for shard in urls:
            check(shard.raw, **given)
        return
    if is_database(one):
        _database(one, options)
    else:
        _backend(Url(one)).check_options(options)
    if options.get("pool") is None:  # the caller's pool is connected by other means
        _backend(Url(one)).check_address(Url(one))


def address(given: Any) -> str | list[str]:
    """One URL, or a list of several. In one text white space separates them, as in a variable of the environment."""
    if type(given) in (list, tuple):  # a URL of SQLAlchemy is a tuple of another type
        return list(given) if len(given) != 1 else given[0]
    if isinstance(given, str) and len(urls := re.split(r"\s+(?=[A-Za-z0-9+]+://)", given.strip())) > 1:
        return urls
    url: str = given  # of another type: `Url` raises the error
    return url


def each_url(url: Address) -> list[str]:
    """The URLs of an address."""
    found = address(url)
    return found if isinstance(found, list) else [found]


def parse_options(url: Address, texts: Sequence[str]) -> dict[str, Any]:
    """Options of `connect` for this URL from texts such as `call_timeout=5`."""
    from millpond.transports.option_parser import parse_texts  # only for the command line

    return parse_texts(_import(_scheme(Url(each_url(url)[0])).options), texts)


def is_database(url: Address) -> bool:
    """True for a database that several processes can use; `memory://` is none."""
    return all(_scheme(Url(one)).is_database for one in each_url(url))


def is_shared(url: Address) -> bool:
    """True if every process that connects finds the same messages: the capability SHARED, without connecting."""
    return all(_scheme(Url(one)).is_shared for one in each_url(url))


def is_file(url: Address) -> bool:
    """True if the messages are in a file, which other machines do not have."""
    return any(_scheme(Url(one)).is_file for one in each_url(url))


def shared_by_handles(url: Address) -> Address:
    """The URL by which several handles of one caller find the same messages: `memory://` gets a name of its own."""
    one = address(url)
    if isinstance(one, list):
        return one
    parsed = Url(one)
    if _scheme(parsed).is_shared or parsed.host or parsed.path.strip("/"):
        return one
    return f"{parsed.scheme}://{new_id()}"


def transactions(url: Address, **options: Any) -> Transactions:
    """The transactions room of a database, without connecting: it works on the caller's own connection."""
    one = address(url)
    return _sharded_transactions(one, options) if isinstance(one, list) else _transactions(one, options)


def _transactions(url: str, options: dict[str, Any], *, sharded: bool = False) -> DatabaseTransactions:
    dialect, checked = _database(url, options)
    hints = importlib.import_module("millpond.transports.database.messages.hints").Hints(dialect)
    identity = importlib.import_module("millpond.transports.database.borrowed.identity")
    module = importlib.import_module("millpond.transports.database.transactions")
    # A pooler may have other names, the caller's pool has its own address, and a shard's row names the shard.
    named = not (sharded or checked.pooler or checked.pool is not None)
    own = identity.OwnDatabase(Url(url).path.removeprefix("/") or None if named else None)
    room: DatabaseTransactions = module.DatabaseTransactions(dialect, checked, hints, sharded=sharded, own=own)
    return room


# --- shards -----------------------------------------------------------------------------------------


async def init_shards(
    urls: Sequence[str], *, names: Sequence[str] | None = None, with_messages: bool = False, **options: Any
) -> ShardMap:
    """Make databases the shards of one pond: store a new shard map on each of them. May be repeated."""
    map_: ShardMap = await _sharded().init(
        _shard_urls(urls), _connect_shard, options, names=names, with_messages=with_messages
    )
    return map_


async def shard_status(urls: Sequence[str], **options: Any) -> list[ShardStatus]:
    """Name, key ranges, map version and number of messages of each shard; also if some do not answer."""
    found: list[ShardStatus] = await _sharded().status(_shard_urls(urls), _connect_shard, options)
    return found


async def add_shard(urls: Sequence[str], name: str, **options: Any) -> ShardMap:
    """Add the one database without a map to the pond, as a shard that owns no key range yet. May be repeated."""
    map_: ShardMap = await _sharded().add(_shard_urls(urls), _connect_shard, options, name=name)
    return map_


async def move_range(
    urls: Sequence[str],
    wanted: str,
    target: str,
    *,
    dry_run: bool = False,
    on_progress: Callable[[MoveProgress], None] | None = None,
    **options: Any,
) -> list[MoveProgress]:
    """Move a key range, or all ranges of a shard, to another shard while the pond is in use. May be repeated."""
    module = importlib.import_module("millpond.transports.sharded.move_commands")
    moves: list[MoveProgress] = await module.move(
        _shard_urls(urls),
        _connect_shard,
        options,
        wanted=wanted,
        target=target,
        dry_run=dry_run,
        on_progress=on_progress,
    )
    return moves


async def abort_move(urls: Sequence[str], **options: Any) -> MapChange | None:
    """Undo a pending change of the shard map before its point of no return. Returns it, or None."""
    module = importlib.import_module("millpond.transports.sharded.move_commands")
    undone: MapChange | None = await module.abort(_shard_urls(urls), _connect_shard, options)
    return undone


async def sweep_shards(urls: Sequence[str], *, dry_run: bool = False, **options: Any) -> list[MoveProgress]:
    """Move messages to their owners that wait on other shards, as plain SQL may have written them. May be repeated."""
    module = importlib.import_module("millpond.transports.sharded.move_commands")
    found: list[MoveProgress] = await module.sweep(_shard_urls(urls), _connect_shard, options, dry_run=dry_run)
    return found


async def shard_records(urls: Sequence[str], **options: Any) -> list[ShardRecord] | None:
    """The record of each shard of one whole map; None if no database has a map. Otherwise an error is raised."""
    found: list[ShardRecord] | None = await _sharded().records(_shard_urls(urls), _connect_shard, options)
    return found


def _sharded() -> ModuleType:
    return importlib.import_module("millpond.transports.sharded.connect")


def _shard_urls(urls: Sequence[str]) -> list[Url]:
    parsed = [Url(url) for url in urls]
    if not parsed:
        raise InvalidOption("the list of URLs is empty; give the URL of each shard")
    for url in parsed:
        if not _scheme(url).is_database:
            raise not_supported(f"a shard with {url.scheme}://", Capability.TRANSACTIONS)
    return parsed


async def _connect_shard(url: Url, **options: Any) -> DatabaseStore:
    store: DatabaseStore = await _backend(url).connect(url, **options)
    return store


def _sharded_transactions(urls: Sequence[str], options: dict[str, Any]) -> ShardedTransactions:
    """One room for each kind of database among the URLs."""
    given = _sharded().check_options(_shard_urls(urls), options)
    first = {_scheme(Url(url)).module: url for url in reversed(urls)}
    module = importlib.import_module("millpond.transports.sharded.transactions")
    rooms = [_transactions(url, given, sharded=True) for url in first.values()]
    room: ShardedTransactions = module.ShardedTransactions(rooms)
    return room


# --- Arrow ------------------------------------------------------------------------------------------


def ddl(url: str, **options: Any) -> str:
    """The tables of a store as one SQL script, for people who manage their schema themselves."""
    dialect, _ = _database(url, options)
    script: str = importlib.import_module("millpond.transports.database.migration.migrate").ddl(dialect)
    return script


def deletes(url: str, **options: Any) -> list[str]:
    """Statements that delete all rows of a store, but not its tables. For the database of tests."""
    dialect, _ = _database(url, options)
    tables = [dialect.qualified(dialect.table(name)) for name in dialect.TABLES if name != "migration"]
    return [f"DELETE FROM {table}" for table in tables]


def open_reader(url: str, *, schema: str | None = None, table_prefix: str = TABLE_PREFIX) -> ArrowReader:
    """Connect to read Arrow record batches; blocking."""
    parsed = Url(url)
    reader: ArrowReader = _import_for_spark(parsed, _arrow(parsed).reader)(parsed, schema, table_prefix)
    return reader


def open_writer(url: str, *, schema: str | None = None, table_prefix: str = TABLE_PREFIX) -> ArrowWriter:
    """Connect to stage Arrow tables for a bulk publish; blocking. Columns: those staged without the lot."""
    parsed = Url(url)
    writer: ArrowWriter = _import_for_spark(parsed, _arrow(parsed).writer)(parsed, schema, table_prefix)
    return writer


def open_part_writer(
    url: str, batch: Batch, number: int, *, schema: str | None = None, table_prefix: str = TABLE_PREFIX
) -> PartWriter | None:
    """Connect to publish one part of a batch without staging; blocking. None if the database has no such way.

    Several may write the same part: the first to commit publishes it.
    """
    parsed = Url(url)
    name = _arrow(parsed).part_writer
    if name is None:
        return None
    writer: PartWriter = _import_for_spark(parsed, name)(parsed, batch, number, schema, table_prefix)
    return writer


def _scheme(url: Url) -> _Scheme:
    try:
        return _SCHEMES[url.scheme]
    except KeyError:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise UnknownScheme(f"no transport for {url.scheme}:// URLs; there are {known}") from None


def _arrow(url: Url) -> _Scheme:
    scheme = _SCHEMES.get(url.scheme)
    if scheme is None or not scheme.reader:
        known = ", ".join(f"{name}://" for name, scheme in _SCHEMES.items() if scheme.reader)
        raise UnknownScheme(f"no database for {url.scheme}:// URLs; there are {known}")
    return scheme


def _import_for_spark(url: Url, name: str) -> Any:
    try:
        return _import(name)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("millpond"):
            raise
        extras = ",".join(filter(None, ("spark", _SCHEMES[url.scheme].extra)))
        raise MissingDriver(
            f'{url.scheme}:// with Spark needs the package {e.name}; install it with: pip install "millpond[{extras}]"'
        ) from e


def _import(name: str) -> Any:
    """A class by its name in this package."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"millpond.transports.{module}"), attribute)


def _backend(url: Url) -> ModuleType:
    scheme = _scheme(url)
    try:
        return importlib.import_module(scheme.module)
    except ModuleNotFoundError as e:
        if scheme.extra is None or (e.name or "").startswith("millpond"):
            raise
        raise MissingDriver(
            f'{url.scheme}:// needs the package {e.name}; install it with: pip install "millpond[{scheme.extra}]"'
        ) from e


def _database(url: str, options: dict[str, Any]) -> tuple[Dialect, StoreOptions]:
    """The dialect and the checked options."""
    parsed = Url(url)
    if not _scheme(parsed).is_database:
        raise not_supported(f"your own transaction, or a schema, with {parsed.scheme}://", Capability.TRANSACTIONS)
    checked = importlib.import_module("millpond.transports.database.options").parse(options)
    return _backend(parsed).dialect(checked), checked
