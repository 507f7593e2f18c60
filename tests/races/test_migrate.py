"""Ten processes migrate at once; workers of the previous version run through a migration."""

from __future__ import annotations

import pytest

import millpond
from millpond import Ack, Message, State
from millpond.errors import NotMigrated, SchemaMismatch
from millpond.transports.database.migration import migrate as migrating
from millpond.transports.database.migration.migrate import Migration
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sqlite.dialect import SqliteDialect
from tests.races.processes import Actors, report
from tests.waiting import until

pytestmark = pytest.mark.slow

THIS = migrating.migrations(SqliteDialect())[-1].version
NEXT = Migration(
    THIS + 1,
    "test",
    """
CREATE TABLE {prefix}message_more (id INTEGER NOT NULL PRIMARY KEY);

-- A column that the previous version does not know, and its index.
ALTER TABLE {message} ADD COLUMN later BIGINT;

CREATE INDEX {prefix}message_later ON {message} (later);

ALTER TABLE {archive} ADD COLUMN later BIGINT;
""",
)
AFTER_NEXT = Migration(THIS + 2, "test", "CREATE TABLE {prefix}message_even_more (id INTEGER NOT NULL PRIMARY KEY);\n")


async def test_ten_at_once(url: str, actors: Actors) -> None:
    migrators = await actors.start_many(10, "migrator", url=url)
    for migrator in migrators:
        migrator.send("go")
    for migrator in migrators:
        assert await migrator.receive() == {"published": 1}
        await migrator.ends()
    store = await millpond.connect(url)
    assert len(await store.claim(["q"], 100)) == 10
    await store.close()
    report("ten migrate", url, messages=10)


async def test_workers_of_the_previous_version_continue(
    url: str, actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotMigrated, match="millpond migrate"):
        await millpond.connect(url, migrate=False)
    store = await millpond.connect(url, migrate=True, busy_timeout=40)
    publishers = await actors.start_many(2, "publisher", url=url, queue="q", kind="bulk", pause=0.05)
    consumers = await actors.start_many(2, "consumer", url=url, queue="q", batch=50)
    for actor in (*publishers, *consumers):
        actor.send("go")

    async def at_work() -> bool:
        (stats, *_) = await store.operations.count() or [None]
        return stats is not None and stats.counts[State.COMPLETED] > 200

    await until(at_work)
    known = migrating.migrations

    async def upgrade(*more: Migration) -> list[Migration]:
        def migrations(d: Dialect) -> list[Migration]:
            return [*known(d), *more]

        with monkeypatch.context() as patch:
            patch.setattr(migrating, "migrations", migrations)
            newer = await millpond.connect(url, migrate=True, busy_timeout=40)
            applied = newer.migrated  # type: ignore[attr-defined]
            await newer.publish([Message(queue="newer", payload=b"x")])
            (claim,) = await newer.claim(["newer"])
            assert await newer.settle([Ack(claim.receipt)]) == []
            await newer.close()
        return list(applied)

    assert [m.version for m in await upgrade(NEXT)] == [THIS + 1]
    (before,) = await store.operations.count(["q"])

    async def still_at_work() -> bool:
        (stats,) = await store.operations.count(["q"])
        return stats.counts[State.COMPLETED] > before.counts[State.COMPLETED] + 500

    await until(still_at_work)
    for actor in (*publishers, *consumers):
        actor.send("stop")
    new = [id_ for publisher in publishers for id_ in (await publisher.receive())["new"]]
    done = [id_ for consumer in consumers for id_ in (await consumer.receive())["done"]]
    for actor in (*publishers, *consumers):
        await actor.ends()
    while claims := await store.claim(["q"], 1_000):
        assert await store.settle([Ack(c.receipt) for c in claims]) == []
        done += [str(c.receipt.id) for c in claims]
    report("migration under load", url, messages=len(new), faults=1, lost=len(set(new) - set(done)))
    assert sorted(new) == sorted(done)
    await store.close()
    # A process of this version that starts now works with the next version and refuses the one after that.
    late = await millpond.connect(url)
    await late.close()
    assert [m.version for m in await upgrade(NEXT, AFTER_NEXT)] == [THIS + 2]
    with pytest.raises(SchemaMismatch, match="upgrade the millpond package"):
        await millpond.connect(url)
