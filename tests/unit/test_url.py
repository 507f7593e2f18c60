"""URLs, and which transport they open; a password is never shown."""

from __future__ import annotations

import pytest

import millpond
from millpond.errors import InvalidURL, UnknownScheme
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


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (f"postgresql://user:{SECRET}@host:5432/db", "postgresql://user:***@host:5432/db"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        (f"mysql://:{SECRET}@host/db", "mysql://:***@host/db"),
        (f"postgresql://user:{SECRET}@host/db?password={SECRET}&sslkey={SECRET}", "postgresql://user:***@host/db"),
        (f"postgresql://user:{SECRET}@[::1]:5432/db", "postgresql://user:***@[::1]:5432/db"),
        ("sqlite:///orders.db", "sqlite:///orders.db"),
        ("memory://", "memory://"),
    ],
)
def test_the_password_is_masked(raw: str, shown: str) -> None:
    """ORB-C7"""
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
    ],
)
def test_what_cannot_be_read_is_refused_without_the_password(raw: object) -> None:
    with pytest.raises(InvalidURL) as error:
        Url(raw)  # type: ignore[arg-type]
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("raw", ["redis://host", "postgrsql://host/db", "://x", f"kafka://u:{SECRET}@h"])
async def test_an_unknown_scheme_says_which_there_are(raw: str) -> None:
    with pytest.raises(UnknownScheme, match="postgresql://") as error:
        await millpond.connect(raw)
    assert SECRET not in str(error.value)
