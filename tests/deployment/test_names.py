"""Names in the database: a clash is found first, old names are replaced, and Alembic and Django leave them alone."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Integer, MetaData, NullPool, Table, create_engine
from sqlalchemy.exc import SAWarning

import millpond
import millpond.sqlalchemy
from millpond.errors import InvalidOption, NotMigrated, SchemaMismatch, TableExists
from millpond.transports.database.sql.dialect import Dialect
from tests.cli.test_migrate import execute as run_script
from tests.shared import KINDS
from tests.triggers import execute

OLD = Path(__file__).parent / "old_layout"
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql"}


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def all_names(url: str) -> set[str]:
    """Tables, partitions and indexes of the database."""
    if url.startswith("sqlite"):
        return {name for (name,) in execute(url, "SELECT name FROM sqlite_master")}
    if url.startswith("postgres"):
        text = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        return {name for (name,) in execute(url, text, text)}
    tables = execute(url, "SELECT table_name FROM information_schema.tables WHERE table_schema = database()")
    indexes = execute(
        url,
        "SELECT DISTINCT index_name FROM information_schema.statistics "
        "WHERE table_schema = database() AND index_name <> 'PRIMARY'",
    )
    # An index that MySQL named after its column has no name of its own.
    return {name for (name,) in (*tables, *indexes) if "_" in name or name in ("message", "archive", "queue")}


def make_old(url: str, prefix: str = "") -> None:
    """Tables of the earlier layout, as they were, with a message, an archived one and a stream."""
    kind = url.partition(":")[0].replace("mariadb", "mysql")
    script = (OLD / f"{kind}.sql").read_text()
    if prefix:
        script = script.replace('"message', f'"{prefix}message').replace("`message", f"`{prefix}message")
        for word in ("INDEX ", "KEY ", "FUNCTION ", "TRIGGER "):
            script = script.replace(f"{word}message", f"{word}{prefix}message")
    run_script(url, script)
    id_ = "'00000000-0000-0000-0000-000000000007'" if kind == "postgresql" else f"x'{7:032x}'"
    columns = "id, queue, priority, due_at, payload, created_at, deliveries, attempts, state"
    values = f"{id_}, 'q', 50, 0, 'b', 0, 0, 0"
    run_script(
        url,
        f"INSERT INTO {prefix}message ({columns}, lane) VALUES ({values}, 'PENDING', 50);"
        f"INSERT INTO {prefix}message_archive ({columns}, archived_at) VALUES ({values}, 'COMPLETED', 1);"
        f"INSERT INTO {prefix}message_stream (name, epoch, acked_seq) VALUES ('s', 1, 0);",
    )


@pytest.mark.parametrize("prefix", ["", "app_"])
async def test_old_names_are_refused_and_can_be_replaced(url: str, prefix: str) -> None:
    make_old(url, prefix)
    options: dict[str, Any] = {"table_prefix": prefix} if prefix else {}
    for migrate in (False, True):
        with pytest.raises(SchemaMismatch if migrate else NotMigrated, match="millpond migrate"):
            await millpond.connect(url, **options, migrate=migrate)
    before = all_names(url)
    with pytest.raises(SchemaMismatch, match="--rename"):
        await millpond.connect(url, **options, migrate=True)
    assert all_names(url) == before

    store = await millpond.connect(url, **options, migrate="rename")
    try:
        assert {str(row.id)[-1] for row in await store.operations.archived()} == {"7"}
        (claim,) = await store.claim(["q"])
        assert claim.message.payload == b"b" and await store.settle([millpond.Ack(claim.receipt)]) == []
        assert [stream.name for stream in await store.streams.status()] == ["s"]
        await store.operations.purge()
    finally:
        await store.close()
    new = prefix or "millpond_"
    assert [name for name in all_names(url) if f"{prefix}message_archive" in name] == []
    assert all(name.startswith((new, "sqlite_")) for name in all_names(url))
    await (await millpond.connect(url, **options, migrate="rename")).close()  # nothing more to do


async def test_renamed_tables_have_the_names_of_new_ones(url: str) -> None:
    make_old(url)
    await (await millpond.connect(url, migrate="rename")).close()
    renamed = all_names(url)
    await (await millpond.connect(url, migrate=True, table_prefix="new_")).close()
    new = {name.replace("new_", "millpond_") for name in all_names(url) if "new_" in name}
    assert renamed == new


@pytest.mark.parametrize("name", ["millpond_message", "millpond_archive", "millpond_export_range"])
async def test_a_clash_is_reported_before_anything_is_created(url: str, name: str) -> None:
    execute(url, f"CREATE TABLE {name} (theirs integer)")
    before = all_names(url)
    with pytest.raises(TableExists, match="--table-prefix or --schema") as error:
        await millpond.connect(url, migrate=True)
    assert name in str(error.value) and all_names(url) == before
    await (await millpond.connect(url, migrate=True, table_prefix="mp_")).close()


ROUTINES = {
    "postgresql": ["CREATE FUNCTION millpond_ack(text) RETURNS text LANGUAGE sql AS $$ SELECT 'theirs' $$"],
    "mysql": [
        "CREATE PROCEDURE Millpond_Ack() SELECT 'theirs'",
        "CREATE TRIGGER millpond_publish_insert BEFORE INSERT ON theirs FOR EACH ROW SET NEW.id = 7",
    ],
    "sqlite": ["CREATE TRIGGER millpond_publish_insert AFTER INSERT ON theirs BEGIN DELETE FROM theirs; END"],
}


async def test_a_routine_of_another_program_is_not_replaced(url: str) -> None:
    execute(url, "CREATE TABLE theirs (id integer)")
    texts = next(texts for kind, texts in ROUTINES.items() if url.startswith(kind))
    for text in texts:
        execute(url, text)
        before = all_names(url)
        with pytest.raises(TableExists, match=re.compile("by the name of millpond_(ack|publish_insert);", re.I)):
            await millpond.connect(url, migrate=True)
        assert all_names(url) == before
        execute(url, " ".join(["DROP", *text.split("(")[0].split()[1:3]]))
    await (await millpond.connect(url, migrate=True)).close()


async def test_a_table_in_the_way_of_a_rename_is_reported(url: str) -> None:
    make_old(url)
    execute(url, "CREATE TABLE millpond_archive (theirs integer)")
    before = all_names(url)
    with pytest.raises(TableExists, match="millpond_archive"):
        await millpond.connect(url, migrate="rename")
    assert all_names(url) == before


async def test_tables_older_than_the_earlier_layout_are_not_renamed(url: str) -> None:
    make_old(url)
    execute(url, "ALTER TABLE message_worker DROP COLUMN doubted_at")
    before = all_names(url)
    with pytest.raises(SchemaMismatch, match="nothing was renamed"):
        await millpond.connect(url, migrate="rename")
    assert all_names(url) == before


async def test_an_empty_prefix_is_refused(url: str) -> None:
    """Functions in SQL would have names such as `call`."""
    with pytest.raises(InvalidOption, match="table_prefix"):
        await millpond.connect(url, migrate=True, table_prefix="")


@pytest.mark.parametrize("prefix", [None, "mp_"])
async def test_alembic_leaves_the_tables_alone(url: str, prefix: str | None) -> None:
    given = {"table_prefix": prefix} if prefix else {}
    await (await millpond.connect(url, migrate=True, **given)).close()
    execute(url, "CREATE TABLE former (id integer)")
    mine = MetaData()
    Table("shop_order", mine, Column("id", Integer, primary_key=True))

    def changes(**options: Any) -> set[tuple[str, str]]:
        scheme = url.partition(":")[0]
        engine = create_engine(url.replace(f"{scheme}:", f"{DRIVERS[scheme]}:", 1), poolclass=NullPool)
        with engine.connect() as connection, warnings.catch_warnings():
            warnings.simplefilter("ignore", SAWarning)  # it knows no type xid8
            found = compare_metadata(MigrationContext.configure(connection, opts=options), mine)
        return {(change[0], change[1].name) for change in found if "table" in change[0]}

    assert ("remove_table", f"{prefix or 'millpond_'}message") in changes()  # without the filter
    only_mine = {("add_table", "shop_order"), ("remove_table", "former")}
    exclude = millpond.sqlalchemy.exclude(prefix) if prefix else millpond.sqlalchemy.exclude()
    assert changes(include_name=exclude) == only_mine

    def own(name: str | None, *_: object) -> bool:
        return name != "former"

    both = millpond.sqlalchemy.exclude(prefix or "millpond_", then=own)
    assert changes(include_name=both) == {("add_table", "shop_order")}


def test_a_filter_without_a_prefix_would_hide_everything() -> None:
    with pytest.raises(InvalidOption):
        millpond.sqlalchemy.exclude("")
    of_schema = millpond.sqlalchemy.exclude(schema="queues")
    assert not of_schema("millpond_message", "table", {"schema_name": "queues"})
    assert of_schema("millpond_message", "table", {"schema_name": None})
    assert of_schema("millpond_x", "index", {"schema_name": "queues"})


DJANGO = """
import sys
from pathlib import Path
import django
from django.conf import settings

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()
from django.db import connection, migrations

operation = migrations.RunSQL(Path(sys.argv[1]).read_text())
with connection.schema_editor() as editor:
    operation.database_forwards("shop", editor, None, None)
print(sorted(name for name in connection.introspection.table_names() if name.startswith("millpond_")))
"""


def test_a_migration_of_django_creates_the_tables(tmp_path: Path) -> None:
    script = tmp_path / "millpond.sql"
    command = [sys.executable, "-m", "millpond", "migrate", "sqlite:///x.db", "--sql"]
    script.write_text(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    done = subprocess.run([sys.executable, "-c", DJANGO, str(script)], capture_output=True, text=True, timeout=60)
    assert "'millpond_archive'" in done.stdout and "'millpond_message'" in done.stdout, done.stderr


def test_the_page_empties_every_table_with_data() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/tables.md").read_text(encoding="utf-8")
    listed = page.split('TABLES = """')[1].split('"""')[0].split()
    assert sorted([*listed, "migration", "shard"]) == sorted(Dialect.TABLES)
