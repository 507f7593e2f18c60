"""URLs and the transports that they open; a password is never shown."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

import millpond
from millpond import Capability, transports
from millpond.errors import InvalidURL, UnknownScheme
from millpond.transports.database import store
from millpond.transports.database.sqlite.memory import MemoryStore
from millpond.transports.rabbitmq import transport as rabbitmq
from millpond.transports.url import Url

SECRET = "s3cr3t"


def test_the_parts() -> None:
    url = Url("PostgreSQL://us%40er:p%3Aw%2F@db.example:5433/orders?sslmode=require&empty=")
    assert (url.scheme, url.user, url.password, url.host, url.port) == (
        "postgresql",
        "us@er",
        "p:w/",
        "db.example",
        5433,
    )
    assert (url.path, url.query) == ("/orders", {"sslmode": "require", "empty": ""})


def test_several_hosts_of_a_cluster() -> None:
    url = Url("amqps://user:p%40@one:5671,two/shop?heartbeat=5")
    assert (url.host, url.port, url.password, url.path) == ("one,two", 5671, "p@", "/shop")
    assert url.each_host == [f"amqps://user:p%40@{host}/shop?heartbeat=5" for host in ("one:5671", "two")]


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (f"postgresql://user:{SECRET}@host:5432/db", "postgresql://user:***@host:5432/db"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        (f"mysql://:{SECRET}@host/db", "mysql://:***@host/db"),
        (f"postgresql://user:{SECRET}@host/db?password={SECRET}&sslkey={SECRET}", "postgresql://user:***@host/db"),
        (f"postgresql://user:{SECRET}@[::1]:5432/db", "postgresql://user:***@[::1]:5432/db"),
        (f"amqp://user:{SECRET}@one:5672,[::1]/vhost?heartbeat=5", "amqp://user:***@one:5672,[::1]/vhost"),
        ("sqlite:///orders.db", "sqlite:///orders.db"),
        ("memory://", "memory://"),
    ],
)
def test_the_password_is_masked(raw: str, shown: str) -> None:
    url = Url(raw)
    assert str(url) == shown
    assert SECRET not in repr(url) and SECRET not in f"{url}"
    assert url.raw == raw


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "orders.db",
        "postgresql:/x",
        None,
        7,
        f"postgresql://user:{SECRET}@host:port/db",
        f"postgresql://user:{SECRET}@host:99999999/db",
        f"postgresql://user:{SECRET}@[::1/db",
        f"postgresql://user:{SECRET}/a@host/db",
        f"postgresql://user:{SECRET}#a@host/db",
        f"postgresql://user:{SECRET}@one:1,two:2/db",
        f"amqp://user:{SECRET}@one:1,two:port/vhost",
        f"amqp://user:{SECRET}@one,,two/vhost",
    ],
)
def test_what_cannot_be_read_is_refused_without_the_password(raw: object) -> None:
    with pytest.raises(InvalidURL) as error:
        Url(raw)  # type: ignore[arg-type]
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("given", "raw"),
    [
        (
            f"postgresql+asyncpg://u:{SECRET}@h:5432/d?sslmode=require",
            f"postgresql://u:{SECRET}@h:5432/d?sslmode=require",
        ),
        ("postgresql+psycopg2://h/d", "postgresql://h/d"),
        ("mysql+aiomysql://h/d", "mysql://h/d"),
        ("mariadb+asyncmy://h/d", "mariadb://h/d"),
        ("sqlite+aiosqlite:///orders.db", "sqlite:///orders.db"),
        ("sqlite+pysqlite:////var/orders.db", "sqlite:////var/orders.db"),
    ],
)
def test_drivers_of_sqlalchemy_are_left_out(given: str, raw: str) -> None:
    url = Url(given)
    assert (url.raw, url.scheme, url.password) == (raw, raw.partition(":")[0], Url(raw).password)
    millpond.Millpond(given)


def test_the_name_of_a_parameter_in_sqlalchemy_is_translated() -> None:
    with pytest.raises(InvalidURL, match=r"'ssl' of another library; write 'sslmode'"):
        millpond.Millpond("postgresql+asyncpg://user@host/shop?ssl=require")


def test_a_url_object_of_sqlalchemy_is_refused_with_the_remedy() -> None:
    """Its text has *** for the password, which would be refused by the server only."""
    with pytest.raises(InvalidURL, match="render_as_string") as error:
        millpond.Millpond(make_url(f"postgresql+asyncpg://u:{SECRET}@h/d"))  # type: ignore[arg-type]
    assert SECRET not in str(error.value)


def test_a_character_set_of_mysql_is_always_the_same() -> None:
    with pytest.raises(InvalidURL, match="leave charset out"):
        millpond.Millpond("mysql+aiomysql://h/d?charset=utf8mb4")


@pytest.mark.parametrize(
    "raw", ["amqp+ssl://host", "redis://host", "postgrsql://host/db", "://x", f"kafka://u:{SECRET}@h"]
)
async def test_an_unknown_scheme_says_which_there_are(raw: str) -> None:
    with pytest.raises(UnknownScheme, match="postgresql://") as error:
        await millpond.connect(raw)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("url", "capabilities"),
    [
        ("memory://", MemoryStore.capabilities),
        ("sqlite:///orders.db", store.CAPABILITIES),
        ("postgresql://host/db", store.CAPABILITIES),
        ("mysql://host/db", store.CAPABILITIES),
        ("amqp://host", rabbitmq.CAPABILITIES),
    ],
)
def test_a_shared_scheme_has_the_capability(url: str, capabilities: Capability) -> None:
    assert transports.is_shared(url) is (Capability.SHARED in capabilities)
