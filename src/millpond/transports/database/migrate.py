"""Migrations: numbered SQL files, applied once each, safely when many processes start at once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import msgspec

from millpond.errors import NotMigrated, SchemaMismatch
from millpond.transports.database.dialect import Dialect
from millpond.transports.database.engine import Engine, Mode
from millpond.transports.database.partitions import make_partitions
from millpond.transports.database.statement import Query, Statement, Steps

APPLIED = "SELECT max(version) FROM {migration}"
_RECORD = "INSERT INTO {migration} (version, name, applied_at) VALUES (:version, :name, {now})"


class Migration(msgspec.Struct, frozen=True):
    version: int
    name: str
    text: str

    def statements(self) -> Iterator[str]:
        """The statements of the file; a comment belongs to the one below it."""
        for part in self.text.split(";\n"):
            if any(line.strip() and not line.lstrip().startswith("--") for line in part.splitlines()):
                yield part.strip()


def migrations(d: Dialect) -> list[Migration]:
    folder = resources.files("millpond.transports.database") / "schema" / d.name
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return [Migration(int(name[:4]), name[5:-4], (folder / name).read_text(encoding="utf-8")) for name in files]


async def migrate(engine: Engine) -> list[Migration]:
    """Bring the database to this version; returns what was applied."""
    fresh = await applied_version(engine) == 0
    applied = await engine.run(lambda: _migrate(engine.dialect, migrations(engine.dialect), fresh))
    await engine.run(lambda: make_partitions(engine.dialect, None))
    return applied


def _migrate(d: Dialect, wanted: list[Migration], fresh: bool) -> Steps[list[Migration]]:
    yield from d.lock_migrations()
    try:
        if fresh:
            for text in d.prelude():
                yield _ddl(d, text)
        version = (yield Query(d.sql(APPLIED), {}))[0][0] or 0
        applied = [migration for migration in wanted if migration.version > version]
        for migration in applied:
            for text in migration.statements():
                yield _ddl(d, text)
            yield Query(d.sql(_RECORD), {"version": migration.version, "name": migration.name, "now": None})
    finally:
        yield from d.unlock_migrations()
    return applied


def ddl(d: Dialect) -> str:
    """Everything as one script, for people who manage their schema themselves."""
    known = migrations(d)
    parts = [d.fill(text) for text in d.prelude()]
    for migration in known:
        parts += [d.fill(text) for text in migration.statements()]
        # The one statement with parameters: here its values stand in the text, and all of them are our own.
        record = d.fill(_RECORD).replace(":now", "NULL").replace(":version", str(migration.version))
        parts.append(record.replace(":name", f"'{migration.name}'"))
    head = f"-- Millpond's tables for {d.name}, version {known[-1].version}: for an empty database, to be run once.\n\n"
    return head + ";\n\n".join(parts) + ";\n"


async def check(engine: Engine, url: str) -> None:
    """Raise what to do unless the tables are of this version, or of the next (a migration is under way)."""
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
    return Query(Statement(d.fill(code)), {})
