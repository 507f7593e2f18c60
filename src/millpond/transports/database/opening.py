"""The last steps of connecting, the same for every database: log in, look at the schema."""

from __future__ import annotations

from millpond.clock import SECOND, micros
from millpond.errors import MillpondError, Unreachable
from millpond.transports.database.dialect import Trouble
from millpond.transports.database.engine import Engine
from millpond.transports.database.migrate import check, migrate
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.store import DatabaseStore
from millpond.transports.url import Url


async def open_store(engine: Engine, options: StoreOptions, url: Url, *, migrate_now: bool = False) -> DatabaseStore:
    """A store on an engine whose database has been looked at, or an error that says what to do."""
    store = DatabaseStore(engine, options, url)
    try:
        if options.migrate or migrate_now:
            store.migrated = await migrate(engine)
        await check(engine, str(url))
    except MillpondError:
        await store.close()
        raise
    except Exception as e:
        await store.close()
        trouble = engine.dialect.trouble(e)
        if trouble is Trouble.FOREIGN:
            raise
        if trouble is Trouble.LOST:
            raise Unreachable(
                f"nothing answers at {url} ({type(e).__name__}); is the server running, and are host and port right?"
            ) from e
        raise store.meaning(e, trouble) from e
    return store


def seconds(options: StoreOptions, name: str) -> float:
    return micros(getattr(options, name), name) / SECOND
