"""`millpond migrate`, and the SQL that it prints for users who manage their schema themselves."""

import asyncio
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import millpond
from millpond.errors import NotMigrated, SchemaMismatch
from tests.cli.conftest import Cli
from tests.sql.shells import run_shell


def connects(url: str, **options: str) -> None:
    """Connect, then publish, claim and settle a message."""

    async def use() -> None:
        store = await millpond.connect(url, **options, migrate=False)
        try:
            await store.publish([millpond.Message(queue="q", payload=b"1")])
            (claim,) = await store.claim(["q"])
            assert await store.settle([millpond.Ack(claim.receipt)]) == []
        finally:
            await store.close()

    asyncio.run(use())


def execute(url: str, script: str) -> None:
    """Run the whole script: with the server's command line, or with SQLite's driver."""
    if url.startswith("sqlite"):
        with sqlite3.connect(urlsplit(url).path[1:]) as connection:
            connection.executescript(script)
        connection.close()
    else:
        run_shell(url, script)


def test_prints_the_applied_migrations_and_then_that_nothing_was_to_do(cli: Cli, empty_url: str) -> None:
    output = cli.ok("migrate", empty_url)
    assert output.out.startswith("applied 0001_queue, ")
    connects(empty_url)
    assert cli.ok("migrate", empty_url).out.startswith("nothing to do: ")
    password = urlsplit(empty_url).password
    assert password is None or password not in output.out


def test_takes_the_url_as_an_option_and_from_the_environment(
    cli: Cli, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.ok("migrate", "--url", sqlite_url, "--json").json["applied"][0] == "0001_queue"
    monkeypatch.setenv("MILLPOND_URL", sqlite_url)
    assert cli.ok("migrate", "--json").json == {"applied": []}


def test_the_printed_sql_makes_a_database_that_connect_accepts(cli: Cli, empty_url: str) -> None:
    execute(empty_url, cli.ok("migrate", empty_url, "--sql").out)
    connects(empty_url)
    assert cli.ok("migrate", empty_url).out.startswith("nothing to do: ")


def test_the_printed_sql_has_the_table_prefix(cli: Cli, empty_url: str) -> None:
    execute(empty_url, cli.ok("migrate", empty_url, "--sql", "--table-prefix", "app_").out)
    connects(empty_url, table_prefix="app_")
    with pytest.raises(NotMigrated):
        connects(empty_url)


def test_the_printed_sql_has_the_schema(cli: Cli, postgres_url: str) -> None:
    execute(postgres_url, cli.ok("migrate", postgres_url, "--sql", "--schema", "queues").out)
    connects(postgres_url, schema="queues")
    assert cli.ok("stats", "--url", postgres_url, "--schema", "queues", "--json").json["queues"]["q"]["COMPLETED"] == 1


@pytest.mark.parametrize(
    "url", ["sqlite:///nowhere/x.db", "postgresql://u:secret@nowhere/d", "mariadb://u:secret@nowhere/d"]
)
def test_printing_sql_connects_to_nothing(cli: Cli, url: str) -> None:
    output = cli.ok("migrate", url, "--sql")
    assert "CREATE TABLE" in output.out and "secret" not in output.out


def test_the_printed_sql_equals_what_migrate_makes(cli: Cli, tmp_path: Path) -> None:
    def tables(name: str) -> list[tuple[str, str]]:
        with sqlite3.connect(tmp_path / name) as connection:
            rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY 1").fetchall()
        connection.close()
        return [(name, " ".join(line for line in sql.split() if line)) for name, sql in rows]

    cli.ok("migrate", f"sqlite:///{tmp_path}/migrated.db")
    execute(f"sqlite:///{tmp_path}/printed.db", cli.ok("migrate", "sqlite:///x.db", "--sql").out)
    without_comments = [(name, sql) for name, sql in tables("printed.db") if "--" not in sql]
    assert set(without_comments) <= set(tables("migrated.db"))
    assert [name for name, _ in tables("printed.db")] == [name for name, _ in tables("migrated.db")]


def test_a_database_of_a_later_version_is_an_error(cli: Cli, empty_url: str) -> None:
    cli.ok("migrate", empty_url)
    execute(empty_url, "INSERT INTO millpond_migration (version, name, applied_at) VALUES (99, 'later', 0);")
    with pytest.raises(SchemaMismatch):
        connects(empty_url)
    error = cli.fails(1, "stats", "--url", empty_url)
    assert "version 99" in error and "upgrade the millpond package" in error


def test_memory_has_nothing_to_migrate(cli: Cli) -> None:
    assert "memory:// has no tables to migrate" in cli.fails(2, "migrate", "memory://")
    assert "give the URL of a database" in cli.fails(2, "migrate", "amqp://localhost", "--sql")
    assert "--queue is for a broker" in cli.fails(2, "migrate", "sqlite:///x.db", "--queue", "q")
    assert "exists in one process only" in cli.fails(2, "stats", "--url", "memory://")
