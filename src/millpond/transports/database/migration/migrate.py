"""Migrations: numbered SQL files, applied once each, safely when many processes start at once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib import resources

import msgspec

from millpond.errors import NotMigrated, SchemaMismatch
from millpond.transports.database.migration.names import check_names, rename
from millpond.transports.database.runner import Engine, Mode
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Statement, Steps

log = logging.getLogger("millpond")

APPLIED = "SELECT max(version) FROM {migration}"
_RECORD = "INSERT INTO {migration} (version, name, applied_at) VALUES (:version, :name, {now})"


class Migration(msgspec.Struct, frozen=True):
    version: int
    name: str
    text: str

    def statements(self) -> Iterator[str]:
        """The statements of the file: an empty line follows each one. A comment belongs to the one below it."""
        for part in re.split(r";\n(?=\n|\Z)", self.text):
            if any(line.strip() and not line.lstrip().startswith("--") for line in part.splitlines()):
                yield part.strip()


def migrations(d: Dialect) -> list[Migration]:
    folder = resources.files("millpond.transports.database") / "schema" / d.name
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return [Migration(int(name[:4]), name[5:-4], (folder / name).read_text(encoding="utf-8")) for name in files]


async def migrate(engine: Engine, url: str, *, renaming: bool = False) -> list[Migration]:
    """Bring the database to this version; returns the applied migrations. `renaming`: first replace old names."""
    d = engine.dialect
    if renaming:
        await _rename(engine, url)
    fresh = await applied_version(engine) == 0
    applied = await engine.run(lambda: _migrate(d, migrations(d), fresh, url))
    await engine.run(lambda: engine.dialect.make_partitions(None))
    return applied


async def _rename(engine: Engine, url: str) -> None:
    d = engine.dialect

    def steps() -> Steps[None]:
        yield from d.lock_migrations()
        try:
            yield from rename(d, url)
        finally:
            yield from d.unlock_migrations()

    try:
        await engine.run(steps)
    except Exception as e:
        if d.is_missing_table(e):
            raise SchemaMismatch(
                f"the tables at {url} lack columns of the last earlier layout; nothing was renamed. Handle their "
                f"messages with the Millpond that made them, and begin with new tables ({e})"
            ) from e
        raise


def _migrate(d: Dialect, wanted: list[Migration], fresh: bool, url: str) -> Steps[list[Migration]]:
    yield from d.lock_migrations()
    try:
        if fresh:
            created = (text for migration in wanted for text in migration.statements())
            yield from check_names(d, url, (*d.prelude(), *created))
            for text in d.prelude():
                yield _ddl(d, text)
        version = (yield Query(d.sql(APPLIED), {}))[0][0] or 0
        applied = [migration for migration in wanted if migration.version > version]
        for migration in applied:
            for text in migration.statements():
                try:
                    yield _ddl(d, text)
                except Exception as e:
                    missing = d.is_dispensable(e)
                    if missing is None:
                        raise
                    log.warning("%s", missing)
            yield Query(d.sql(_RECORD), {"version": migration.version, "name": migration.name, "now": None})
    finally:
        yield from d.unlock_migrations()
    return applied


def ddl(d: Dialect) -> str:
    """Everything as one script, for people who manage their schema themselves."""
    known = migrations(d)
    parts = [d.fill(text) for text in d.prelude()]
    for migration in known:
        parts += [d.in_migration(text) for text in migration.statements()]
        # The only statement with parameters. Its values are our own and are written into the text.
        record = d.fill(_RECORD).replace(":now", "NULL").replace(":version", str(migration.version))
        parts.append(record.replace(":name", f"'{migration.name}'"))
    parts = [d.script(part) for part in parts]
    head = f"-- Millpond's tables for {d.name}, version {known[-1].version}: for an empty database, to be run once.\n\n"
    return head + "\n".join(parts)


async def check(engine: Engine, url: str) -> None:
    """Raise unless the tables have this version, or the next one (a migration is under way)."""
    judge(await applied_version(engine), engine.dialect, url)


def judge(version: int, d: Dialect, url: str) -> None:
    known = migrations(d)[-1].version
    if version < known:
        what = "has none of Millpond's tables" if version == 0 else f"has tables of version {version}, not {known}"
        raise NotMigrated(f"the database at {url} {what}; run: millpond migrate {url}")
    if version > known + 1:
        raise SchemaMismatch(
            f"the database at {url} has tables of version {version}, and this Millpond works with {known} "
            f"and {known + 1}; upgrade the millpond package"
        )


async def applied_version(engine: Engine) -> int:
    """The newest migration of the database; 0 if there is none."""

    def steps() -> Steps[int]:
        return (yield Query(engine.dialect.sql(APPLIED), {}))[0][0] or 0

    try:
        return await engine.run(steps, Mode.READ)
    except Exception as e:
        if engine.dialect.is_missing_table(e):
            return 0
        raise


def _ddl(d: Dialect, text: str) -> Query:
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    return Query(Statement(d.in_migration(code)), {})
