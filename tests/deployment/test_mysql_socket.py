"""A MySQL or MariaDB server that is reached by its socket."""

from urllib.parse import quote
from uuid import uuid4

import millpond
from millpond import Message
from tests.triggers import execute


async def test_the_socket_of_a_url_is_used(mariadb_url: str) -> None:
    ((path,),) = execute(mariadb_url, "SELECT @@socket")
    database, name = mariadb_url.rpartition("/")[2], f"local_{uuid4().hex[:8]}"
    account = f"'{name}'@'localhost'"  # accounts of a socket have this host
    execute(mariadb_url, f"CREATE USER {account} IDENTIFIED BY 'pass'", f"GRANT ALL ON `{database}`.* TO {account}")
    url = f"mysql://{name}:pass@localhost:1/{database}?unix_socket={quote(path)}"  # nothing listens on this port
    store = await millpond.connect(url, migrate=True)
    await store.publish([Message(queue="q", payload=b"1")])
    assert len(await store.claim(["q"])) == 1
    await store.close()
    execute(mariadb_url, f"DROP USER {account}")
