"""Connecting: each mistake raises its own error, soon, and no error contains the password."""

import logging
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import psycopg
import pytest

import millpond
from millpond.errors import (
    AuthenticationFailed,
    EncryptionFailed,
    InvalidOption,
    InvalidURL,
    MillpondError,
    MissingDriver,
    NotMigrated,
    StoreError,
    UnknownDatabase,
    UnknownScheme,
    Unreachable,
)
from servers import MariaDB, Postgres, Proxy
from tests.deployment.work import everything
from tests.waiting import until

CANARY = "c4n4ry"
TRICKY = f"{CANARY}@:/?#[]% &=+;'\"\\$ü"


@pytest.fixture(params=["postgres", "mariadb"])
def url(request: pytest.FixtureRequest) -> str:
    fixture: str = request.getfixturevalue(f"{request.param}_url")
    return fixture


def secret(url: str) -> str:
    return urlsplit(url).password or ""


async def error_of(url: str, **options: object) -> MillpondError:
    with pytest.raises(MillpondError) as told:
        await millpond.connect(url, **options)
    return told.value


async def test_wrong_password(url: str) -> None:
    error = await error_of(url.replace(secret(url), CANARY))
    assert type(error) is AuthenticationFailed
    assert "password" in str(error)


async def test_nothing_listens(url: str) -> None:
    started = time.monotonic()
    error = await error_of(url.replace(str(urlsplit(url).port), "1"))
    assert type(error) is Unreachable
    assert error.retryable
    assert time.monotonic() - started < 30


async def test_unknown_host(url: str) -> None:
    assert type(await error_of(url.replace("127.0.0.1", "nowhere.invalid"))) is Unreachable


async def test_a_silent_host(url: str) -> None:
    with Proxy(urlsplit(url).port or 0) as proxy:
        proxy.black_hole()
        started = time.monotonic()
        assert type(await error_of(proxy.url(url), call_timeout=1)) is Unreachable
        assert time.monotonic() - started < 30


async def test_unknown_database(url: str) -> None:
    error = await error_of(url.rpartition("/")[0] + "/no_such_database")
    assert type(error) is UnknownDatabase
    assert "create it first" in str(error)
    assert type(await error_of(url.rpartition("/")[0] + "/no_such_database", migrate=True)) is UnknownDatabase


async def test_no_tables(url: str) -> None:
    error = await error_of(url)
    assert type(error) is NotMigrated
    assert "millpond migrate" in str(error)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", InvalidURL),
        ("orders.db", InvalidURL),
        ("://", UnknownScheme),
        ("postgresql://host:port/db", InvalidURL),
        ("postgresql://[::1/db", InvalidURL),
        ("oracle://user:c4n4ry@host/db", UnknownScheme),
        ("mysql://user:c4n4ry@host", InvalidURL),
        ("mysql://user:c4n4ry@host/a/b", InvalidURL),
        ("mysql://user:c4n4ry@host/db?charset=latin1", InvalidURL),
        ("mysql://user:c4n4ry@host/db?ssl=maybe", InvalidURL),
        ("mysql://user:c4n4ry@host/db?ssl_ca=/no/such/file", InvalidURL),
        ("postgresql://user:c4n4ry@host/db?sslmod=require", InvalidURL),
        ("postgresql://user:c4n4ry@host/db?sslmode=sometimes", InvalidURL),
        ("postgresql://user:c4n4ry@host/db?sslmode=verify-full&sslrootcert=/no/such/file", InvalidURL),
        ("postgresql://user:1/c4n4ry@host/db", InvalidURL),
        ("postgresql://user:1#c4n4ry@host/db", InvalidURL),
        ("postgresql://user:1?c4n4ry@host/db", InvalidURL),
        ("mysql://user:a@b/c4n4ry@host/db", InvalidURL),
    ],
)
async def test_urls_that_cannot_be_meant(text: str, kind: type[Exception]) -> None:
    error = await error_of(text)
    assert type(error) is kind
    assert CANARY not in whole_text(error)


async def test_a_misspelt_parameter_is_guessed() -> None:
    assert "the nearest one is 'sslmode'" in str(await error_of("postgresql://host/db?sslmod=require"))
    assert "there are none" in str(await error_of("sqlite:///orders.db?mode=ro"))


async def test_tls_is_said_once() -> None:
    assert type(await error_of("postgresql://host/db?sslmode=disable", tls=True)) is InvalidOption
    assert type(await error_of("mysql://host/db?ssl=false", tls=True)) is InvalidOption


# --- passwords -----------------------------------------------------------------------------------------------


def whole_text(error: BaseException) -> str:
    """Everything that a log shows of an error, and more: every cause, with its repr."""
    texts = ["".join(traceback.format_exception(error))]
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        texts += [str(cause), repr(cause), *map(repr, cause.args)]
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)


@pytest.fixture
def tricky_urls(
    postgres_server: Postgres, postgres_url: str, mariadb_server: MariaDB, mariadb_url: str
) -> Iterator[list[str]]:
    """Logins whose password has every character with a meaning in a URL."""
    user, password = "tricky", quote(TRICKY, safe="")
    urls = []
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(f"CREATE USER {user} SUPERUSER PASSWORD {psycopg.sql.Literal(TRICKY).as_string(c)}")
    literal = TRICKY.replace("\\", "\\\\").replace("'", "\\'")
    mariadb_server.execute(f"CREATE USER {user} IDENTIFIED BY '{literal}'")
    mariadb_server.execute(f"GRANT ALL ON *.* TO {user}")
    for url in (postgres_url, mariadb_url):
        parts = urlsplit(url)
        urls.append(f"{parts.scheme}://{user}:{password}@{parts.hostname}:{parts.port}{parts.path}")
    yield urls
    mariadb_server.execute(f"DROP USER {user}")
    with psycopg.connect(postgres_server.url, autocommit=True) as c:
        c.execute(f"ALTER USER {user} RENAME TO {user}_{time.monotonic_ns()}")


async def test_a_password_of_special_characters(tricky_urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for url in tricky_urls:
        store = await millpond.connect(url, migrate=True)
        await everything(store, "q")
        assert CANARY not in repr(store) + str(store) + repr(vars(store))
        await store.close()
    assert CANARY not in caplog.text


async def test_no_error_tells_the_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    parts = urlsplit(url)
    told = quote(TRICKY, safe="")
    for host, port, path, options in (
        (parts.hostname, parts.port, parts.path, {}),
        (parts.hostname, 1, parts.path, {}),
        ("nowhere.invalid", parts.port, parts.path, {}),
        (parts.hostname, parts.port, "/no_such", {}),
        (parts.hostname, parts.port, parts.path, {"pool_size": 0}),
        (parts.hostname, parts.port, parts.path, {"tls": True}),
    ):
        error = await error_of(f"{parts.scheme}://someone:{told}@{host}:{port}{path}", **options)
        assert CANARY not in whole_text(error)
    assert CANARY not in caplog.text


# --- drivers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "package", "extra"), [("postgresql", "asyncpg", "postgres"), ("mariadb", "asyncmy", "mysql")]
)
def test_a_missing_driver_names_the_extra(scheme: str, package: str, extra: str) -> None:
    program = f"""
import asyncio, sys
sys.modules[{package!r}] = None
import millpond
from millpond.errors import MissingDriver
try:
    asyncio.run(millpond.connect("{scheme}://user:secret@127.0.0.1:1/db"))
except MissingDriver as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f'{package}; install it with: pip install "millpond[{extra}]"' in done.stdout
    assert issubclass(MissingDriver, ImportError)


def test_no_driver_is_imported_before_it_is_needed() -> None:
    program = "import sys, millpond; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"asyncpg", "asyncmy", "psycopg", "pymysql", "sqlalchemy", "django", "aiosqlite"}


# --- TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_postgres() -> Iterator[Postgres]:
    with Postgres(ssl=True) as server:
        yield server


@pytest.fixture(scope="module")
def tls_mariadb() -> Iterator[MariaDB]:
    with MariaDB(ssl=True) as server:
        yield server


@pytest.fixture
def other_ca(tls_postgres: Postgres, tls_mariadb: MariaDB, request: pytest.FixtureRequest) -> dict[str, str]:
    """A certificate for each server; neither signed the other."""
    return {"postgres": str(tls_mariadb.certificate), "mariadb": str(tls_postgres.certificate)}


async def test_postgres_tls(tls_postgres: Postgres, other_ca: dict[str, str]) -> None:
    ca = str(tls_postgres.certificate)
    verified = tls_postgres.url_of("postgres", sslmode="verify-full", sslrootcert=ca)
    for url, options in (
        (verified, {}),
        (tls_postgres.url, {"tls": ssl.create_default_context(cafile=ca)}),
        (tls_postgres.url_of("postgres", sslmode="require"), {}),
        (tls_postgres.url, {}),  # asyncpg prefers TLS
    ):
        store = await millpond.connect(url, migrate=True, **options)
        await everything(store, "q")
        await store.close()
    untrusted = tls_postgres.url_of("postgres", sslmode="verify-full", sslrootcert=other_ca["postgres"])
    assert type(await error_of(untrusted)) is EncryptionFailed
    assert type(await error_of(tls_postgres.url, tls=True)) is EncryptionFailed
    assert type(await error_of(tls_postgres.url_of("postgres", sslmode="verify-full"))) is InvalidURL
    assert type(await error_of(tls_postgres.url_of("postgres", sslmode="disable"))) is AuthenticationFailed
    assert type(await error_of(tls_postgres.url, tls=False)) is AuthenticationFailed


async def test_mariadb_tls(tls_mariadb: MariaDB, other_ca: dict[str, str]) -> None:
    ca = str(tls_mariadb.certificate)
    for url, options in (
        (f"{tls_mariadb.url}?ssl_ca={ca}", {}),
        (f"{tls_mariadb.url}?ssl=true&ssl_ca={ca}", {}),
        (tls_mariadb.url, {"tls": ssl.create_default_context(cafile=ca)}),
    ):
        store = await millpond.connect(url, migrate=True, **options)
        await everything(store, "q")
        await store.close()
    assert type(await error_of(f"{tls_mariadb.url}?ssl_ca={other_ca['mariadb']}")) is EncryptionFailed
    assert type(await error_of(f"{tls_mariadb.url}?ssl=true")) is EncryptionFailed
    assert type(await error_of(tls_mariadb.url, tls=True)) is EncryptionFailed
    assert type(await error_of(tls_mariadb.url)) is AuthenticationFailed


async def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    assert type(await error_of(f"mysql://host/db?ssl_ca={tmp_path / 'ca'}")) is InvalidURL


async def test_a_server_without_tls(postgres_url: str, mariadb_url: str) -> None:
    """With TLS required, no password is sent to a server without TLS."""
    assert type(await error_of(f"{postgres_url}?sslmode=require")) is EncryptionFailed
    assert type(await error_of(postgres_url, tls=True)) is EncryptionFailed
    assert type(await error_of(mariadb_url, tls=True)) is EncryptionFailed


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    path.write_text("no database" * 100)
    threads = set(threading.enumerate())
    for migrate in (None, True):
        with pytest.raises(StoreError, match=r"orders\.db answered: DatabaseError: file is not a database"):
            await millpond.connect(f"sqlite:///{path}", migrate=migrate)
    await until(lambda: set(threading.enumerate()) <= threads, "the end of the threads")
