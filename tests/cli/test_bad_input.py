"""Each kind of bad input: one error class, a text with the remedy, nothing written in part, no password.

Tried through the transport, `Millpond` and the command line.
"""

import asyncio
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

import millpond
from millpond import Message, Millpond
from millpond.errors import (
    AuthenticationFailed,
    BodyNotEncodable,
    BodyTooLarge,
    Closed,
    InvalidMessage,
    InvalidOption,
    InvalidPriority,
    InvalidQueue,
    InvalidTime,
    InvalidURL,
    MillpondError,
    MissingDriver,
    NotMigrated,
    SchemaMismatch,
    UnknownScheme,
    Unreachable,
)
from servers.ports import free_port
from tests.cli.conftest import Cli, with_store
from tests.cli.test_migrate import execute

SECRET = "s3cr3t-p4ss"
NAIVE = datetime(2030, 1, 31, 8)


@pytest.fixture(autouse=True)
def nothing_is_logged_with_a_password(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text


def caught(error_class: type[MillpondError], work: Callable[[], Any], *, text: str, password: str = SECRET) -> None:
    """The call raises exactly this class with the remedy in its text, and shows the password nowhere."""
    with pytest.raises(error_class) as info:
        result = work()
        if isinstance(result, Coroutine):
            asyncio.run(result)
    error = info.value
    assert type(error) is error_class
    assert text in str(error), str(error)
    everything = "".join(traceback.format_exception(error)) + repr(error)
    assert password not in everything


def replaced(url: str, *, password: str | None = None, port: int | None = None) -> str:
    parts = urlsplit(url)
    login = f"{parts.username}:{password or parts.password}@"
    return parts._replace(netloc=f"{login}{parts.hostname}:{port or parts.port}").geturl()


def password_of(url: str) -> str:
    return urlsplit(url).password or SECRET


# --- messages -----------------------------------------------------------------------------------------


BAD_MESSAGES: list[tuple[type[MillpondError], str, dict[str, Any]]] = [
    (BodyTooLarge, "raise the option body_limit", {"payload": b"x" * (1024 * 1024 + 1)}),
    (BodyTooLarge, "the limit is 65,536", {"headers": {"h": "x" * 70_000}}),
    (InvalidTime, "give it a time zone, e.g. datetime.now(timezone.utc)", {"due_at": NAIVE}),
    (InvalidTime, "give it a time zone", {"expires": NAIVE}),
    (InvalidTime, "zero or more seconds, not -1", {"delay": -1}),
    (InvalidTime, "zero or more seconds", {"expires": -0.5}),
    (InvalidTime, "either delay or due_at", {"delay": 1, "due_at": NAIVE}),
    (InvalidPriority, "from 0 (first) to 100 (last), not 101", {"priority": 101}),
    (InvalidPriority, "from 0 (first) to 100 (last), not -1", {"priority": -1}),
    (InvalidPriority, "an integer", {"priority": 1.5}),
    (BodyNotEncodable, "pond.publish() encodes text and JSON", {"payload": {"sku": 7}}),
    (BodyNotEncodable, "headers must be JSON", {"headers": {"h": object()}}),
    (InvalidQueue, "must not be empty", {"queue": ""}),
    (InvalidQueue, "the limit is 255", {"queue": "q" * 10_000}),
    (InvalidQueue, "NUL", {"queue": "a\0b"}),
    (InvalidQueue, "NUL", {"key": "a\0b"}),
    (InvalidMessage, "millpond.id_from(", {"id": "order-7"}),
]


def test_a_bad_message_is_refused_and_its_neighbours_with_it(url: str) -> None:
    good = Message(queue="orders", payload=b"1")

    async def work(store: Any) -> None:
        for error_class, text, wrong in BAD_MESSAGES:
            bad = Message(**{"queue": "orders", "payload": b"1", **wrong})
            for messages in ([bad], [good, bad, good]):
                with pytest.raises(error_class) as info:
                    await store.publish(messages)
                assert type(info.value) is error_class and text in str(info.value)
        assert await store.operations.browse() == []

    with_store(url, work)


def test_the_body_limit_is_an_option(url: str) -> None:
    async def work(store: Any) -> None:
        await store.publish([Message(queue="q", payload=b"x" * 10)])
        with pytest.raises(BodyTooLarge, match="has 11 bytes, the limit is 10"):
            await store.publish([Message(queue="q", payload=b"x" * 11)])
        assert len(await store.operations.browse()) == 1

    with_store(url, work, body_limit=10)


BAD_BODIES: list[tuple[type[MillpondError], str, Any, dict[str, Any]]] = [
    (BodyNotEncodable, "give bytes, text, or values that JSON has", object(), {}),
    (BodyNotEncodable, "give bytes, text, or values that JSON has", {1, 2, object()}, {}),
    (BodyNotEncodable, "half of a surrogate pair", "\ud800", {}),
    (BodyTooLarge, "send a reference", "x" * (1024 * 1024 + 1), {}),
    (InvalidTime, "give it a time zone", 1, {"due_at": NAIVE}),
    (InvalidTime, "zero or more seconds", 1, {"delay": -1}),
    (InvalidPriority, "from 0 (first) to 100 (last)", 1, {"priority": 1000}),
    (InvalidMessage, "millpond.id_from(", 1, {"id": "order-7"}),
    (InvalidMessage, "headers must be a mapping", 1, {"headers": [1]}),
]


def test_the_pond_raises_the_same_errors(url: str) -> None:
    async def work() -> None:
        async with Millpond(url) as pond:
            for error_class, text, body, options in BAD_BODIES:
                with pytest.raises(error_class) as info:
                    await pond.publish("orders", body, **options)
                assert text in str(info.value)
                many = {name: value for name, value in options.items() if name != "id"}
                with pytest.raises(MillpondError):
                    await pond.publish_many("orders", [1, body, 2], **many, ids=[uuid4()] if "id" in options else None)
            assert await (await pond.transport).operations.browse() == []

    asyncio.run(work())
    pond = Millpond(url)
    for error_class, text, body, options in BAD_BODIES:
        caught(error_class, lambda b=body, o=options: pond.publish_sync("orders", b, **o), text=text)
    pond.close_sync()


def test_a_body_that_is_not_json_on_the_command_line(cli: Cli, url: str) -> None:
    assert "quote it as JSON, or send it as plain text with --text" in cli.fails(2, "publish", "orders", "hello")
    assert "body_limit" in cli.fails(2, "publish", "orders", "-", stdin=b'"' + b"x" * (1024 * 1024) + b'"')
    assert cli.ok("list", "--json").json == {"messages": []}


# --- options and URLs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("the nearest one is 'pool_size'", {"pool_sise": 3}),
        ("there are schema, table_prefix", {"colour": "red"}),
        ("pool_size must be an integer", {"pool_size": 0}),
        ("body_limit must be an integer", {"body_limit": "1MB"}),
        ("busy_timeout must be seconds", {"busy_timeout": "10s"}),
        ("table_prefix 'a b' must begin with a letter", {"table_prefix": "a b"}),
        ("schema and table_prefix must be text", {"table_prefix": 7}),
        ("pooler must be True or False", {"pooler": "no"}),
        ("migrate must be True, False, None or", {"migrate": "no"}),
    ],
)
def test_a_wrong_option(sqlite_url: str, text: str, options: dict[str, Any]) -> None:
    for url in (sqlite_url, f"postgresql://u:{SECRET}@localhost/d", f"mysql://u:{SECRET}@localhost/d"):
        caught(InvalidOption, lambda url=url: millpond.connect(url, **options), text=text)
        caught(InvalidOption, lambda url=url: Millpond(url, **options), text=text)


@pytest.mark.parametrize(
    ("error_class", "text", "url"),
    [
        (InvalidURL, "sqlite:///orders.db", "orders.db"),
        (InvalidURL, "sqlite:///orders.db", ""),
        (InvalidURL, "sqlite:////var/lib/orders.db", "sqlite://orders.db"),
        (InvalidURL, "memory://", "sqlite:///:memory:"),
        (InvalidURL, "create it first", "sqlite:///no/such/folder/orders.db"),
        (UnknownScheme, "there are memory://, sqlite://", f"oracle://u:{SECRET}@host/d"),
        (InvalidURL, "check its port", f"postgresql://u:{SECRET}@host:port/d"),
        (InvalidURL, "%2F for /", f"postgresql://u:1/{SECRET}@host/d"),
        (InvalidURL, "%2F for /", f"postgresql://u:x@{SECRET}/y@host/d"),
        (InvalidURL, "%23 for #", f"mysql://u:2#{SECRET}@host/d"),
        (InvalidURL, "names no database", f"mysql://u:{SECRET}@host"),
    ],
)
def test_a_wrong_url(cli: Cli, error_class: type[MillpondError], text: str, url: str) -> None:
    caught(error_class, lambda: millpond.connect(url), text=text)
    error = cli.fails(2, "migrate", url) if url else cli.fails(2, "migrate")
    assert SECRET not in error
    assert text in error or not url


def test_without_a_url_the_error_names_the_option(cli: Cli) -> None:
    for command in (["stats"], ["publish", "q", "1"], ["migrate"], ["purge"]):
        assert "set MILLPOND_URL" in cli.fails(2, *command)


def test_a_missing_driver_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    import sys

    for scheme, package, module, extra in (
        ("postgresql", "asyncpg", "millpond.transports.database.postgres.engine", "postgres"),
        ("mysql", "asyncmy", "millpond.transports.database.mysql.engine", "mysql"),
    ):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setitem(sys.modules, package, None)
        url = f"{scheme}://u:{SECRET}@host/d"
        text = f'{scheme}:// needs the package {package}; install it with: pip install "millpond[{extra}]"'
        caught(MissingDriver, lambda url=url: millpond.connect(url), text=text)
        assert text in cli.fails(2, "stats", "--url", url)


# --- the database -------------------------------------------------------------------------------------


def test_a_closed_store(url: str) -> None:
    async def work() -> None:
        store = await millpond.connect(url)
        await store.close()
        await store.close()
        for call in (
            lambda: store.publish([Message(queue="q", payload=b"1")]),
            lambda: store.claim(["q"]),
            lambda: store.settle([]),
            lambda: store.extend([]),
            lambda: store.wait(["q"], 1),
        ):
            with pytest.raises(Closed, match="connect again"):
                await call()
        pond = Millpond(url)
        await pond.publish("q", 1)
        await pond.close()
        with pytest.raises(Closed, match="make a new one"):
            await pond.publish("q", 1)
        with pytest.raises(Closed, match="make a new one"):
            pond.publish_sync("q", 1)

    asyncio.run(work())


def test_an_unmigrated_database(cli: Cli, empty_url: str) -> None:
    caught(
        NotMigrated,
        lambda: millpond.connect(empty_url, migrate=False),
        text="run: millpond migrate " if "sqlite" not in empty_url else "make it with: millpond migrate ",
        password=password_of(empty_url),
    )
    error = cli.fails(1, "stats", "--url", empty_url)
    assert "millpond migrate " in error and password_of(empty_url) not in error
    caught(NotMigrated, lambda: millpond.connect(empty_url, migrate=False), text="millpond migrate ")  # as before


def test_a_sqlite_file_without_our_tables(cli: Cli, sqlite_url: str) -> None:
    execute(sqlite_url, "CREATE TABLE theirs (id INTEGER);")
    caught(NotMigrated, lambda: millpond.connect(sqlite_url, migrate=False), text="run: millpond migrate sqlite:///")


def test_a_table_of_another_version(cli: Cli, url: str) -> None:
    execute(url, "INSERT INTO millpond_migration (version, name, applied_at) VALUES (77, 'later', 0);")
    try:
        caught(
            SchemaMismatch,
            lambda: millpond.connect(url),
            text="upgrade the millpond package",
            password=password_of(url),
        )
        assert "version 77" in cli.fails(1, "publish", "q", "1")
    finally:  # the database is shared with other tests
        execute(url, "DELETE FROM millpond_migration WHERE version = 77;")
    assert cli.ok("list", "--json").json == {"messages": []}


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_a_wrong_password(cli: Cli, database: str, request: pytest.FixtureRequest) -> None:
    url = replaced(request.getfixturevalue(f"{database}_url"), password=SECRET)
    caught(AuthenticationFailed, lambda: millpond.connect(url), text="check user, password")
    for command in (["stats", "--url", url], ["migrate", url]):
        error = cli.fails(1, *command)
        assert "check user, password" in error and SECRET not in error
    output = cli("--debug", "stats", "--url", url)
    assert "Traceback" in output.err and SECRET not in output.err


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_an_unreachable_host(cli: Cli, scheme: str) -> None:
    url = f"{scheme}://u:{SECRET}@127.0.0.1:{free_port()}/d"
    caught(Unreachable, lambda: millpond.connect(url), text="check that the server runs")
    assert "check that the server runs" in cli.fails(1, "stats", "--url", url)
    nowhere = f"{scheme}://u:{SECRET}@no-such-host.invalid/d"
    caught(Unreachable, lambda: millpond.connect(nowhere), text="host and port")


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_a_database_that_does_not_exist(cli: Cli, database: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(f"{database}_url") + "_gone"
    with pytest.raises(MillpondError) as info:
        asyncio.run(millpond.connect(url, migrate=True))
    assert "no such database" in str(info.value) and "create it first" in str(info.value)
    error = cli.fails(1, "migrate", url)
    assert password_of(url) not in error


# --- nothing shows a password -------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgres", "mariadb"])
def test_no_repr_shows_the_password(cli: Cli, database: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(f"{database}_url")
    password = password_of(url)

    async def work() -> None:
        async with Millpond(url, migrate=True) as pond:
            store = await pond.transport
            for thing in (pond, store, pond.url):
                assert password not in f"{thing} {thing!r}" and ":***@" in repr(thing)

    asyncio.run(work())
    assert password not in cli("stats", "--help").out


def test_help_shows_no_url_from_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_URL", f"postgresql://u:{SECRET}@host/d")
    for command in ("migrate", "stats", "publish"):
        assert SECRET not in cli.ok(command, "--help").out
    assert SECRET not in cli.fails(2, "stats", "--nonsense")
