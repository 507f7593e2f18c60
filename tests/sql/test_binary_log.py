"""MariaDB with a binary log, and an account that may make no trigger: no INSERT is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pymysql
import pytest

import millpond
from millpond import Ack
from servers import MariaDB
from tests.rooms.transactions.callers import address
from tests.triggers import execute

PUBLISH = "INSERT INTO millpond_publish (queue, body) VALUES ('q', 'x')"


async def test_an_insert_without_the_trigger_is_refused(mariadb_url: str) -> None:
    store = await millpond.connect(mariadb_url, migrate=True)
    execute(mariadb_url, PUBLISH, "DROP TRIGGER millpond_publish_insert")
    for mode in ("STRICT_ALL_TABLES", ""):
        with pytest.raises(pymysql.err.OperationalError, match="millpond_publish_lacks_its_trigger"):
            execute(mariadb_url, f"SET sql_mode = '{mode}'", PUBLISH)
    assert len(await store.claim(["q"], limit=9)) == 1
    await store.close()


@pytest.fixture
def plain_account(tmp_path: Path) -> Iterator[str]:
    """The URL of an account that owns its database, and has no right of the whole server."""
    with MariaDB(settings={"log-bin": "log", "server-id": "1"}) as server:
        server.execute("CREATE USER 'shop'@'%' IDENTIFIED BY 'secret'")
        server.execute("GRANT ALL ON millpond.* TO 'shop'@'%'")
        parts = urlsplit(server.url)
        yield urlunsplit(parts._replace(netloc=f"shop:secret@{parts.hostname}:{parts.port}"))


@pytest.mark.slow
@pytest.mark.server
async def test_an_account_that_may_make_no_trigger(plain_account: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        store = await millpond.connect(plain_account, migrate=True)
    assert "INSERT INTO millpond_publish does not publish" in caplog.text
    connection: Any = pymysql.connect(**address(plain_account), autocommit=True)
    with connection, connection.cursor() as cursor:
        with pytest.raises(pymysql.err.OperationalError, match="millpond_publish_lacks_its_trigger"):
            cursor.execute(PUBLISH)
        cursor.execute("CALL millpond_publish('q', 'x', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)")
    (claim,) = await store.claim(["q"], limit=9)
    assert await store.settle([Ack(claim.receipt)]) == []
    await store.operations.purge()
    await store.close()
