"""The last steps of connecting, the same for every database: migrate, check the schema."""

from __future__ import annotations

import asyncio

from millpond.errors import InvalidOption, MillpondError, Unreachable
from millpond.transports.database.borrowed.identity import read_identity
from millpond.transports.database.migration.migrate import applied_version, check, migrate
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.runner import Engine, Mode
from millpond.transports.database.shards import read_record
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url


async def open_store(engine: Engine, options: StoreOptions, url: Url, *, migrate_new: bool = False) -> DatabaseStore:
    """A store on an engine after a check of its schema, or an error with the remedy.

    `migrate_new`: a database without our tables gets them.
    """
    store = DatabaseStore(engine, options, url)
    try:
        if options.migrate or (migrate_new and await applied_version(engine) == 0):
            store.migrated = await migrate(engine, str(url), renaming=options.migrate == "rename")
        await check(engine, str(url))
        store.own_database.learn(await engine.run(lambda: read_identity(engine.dialect), Mode.READ))
        record = await engine.run(lambda: read_record(engine.dialect), Mode.READ)
        if record is not None and len(record.map.shards) > 1:
            store.shard = record
    except (MillpondError, asyncio.CancelledError):
        await store.close()
        raise
    except Exception as e:
        await store.close()
        kind = engine.dialect.error_kind(e)
        if kind is ErrorKind.FOREIGN:
            raise
        if "startup parameter" in str(e):
            raise InvalidOption(
                f"{url} is a pooler that passes no settings on ({e}); connect with pooler=True, in Spark with the "
                "option pooler=true, in commands of a lake with --pooler"
            ) from None
        if kind is ErrorKind.LOST:
            raise Unreachable(
                f"nothing answers at {url} ({type(e).__name__}); check that the server runs, and host and port"
            ) from e
        raise store.runner.translated(e, kind) from e
    return store
