"""One set of servers for all processes of a parallel run.

The process that pytest was started in owns the servers: it outlives the processes that run the tests. Those ask it
over a local socket, and the first request for a server starts it. A run that is killed leaves nothing behind, because
each server has a guard (`servers/guard.py`).
"""

import threading
from collections import defaultdict
from multiprocessing.connection import Client, Connection, Listener

from servers import MariaDB, Postgres, RabbitMQ, Server

_CONNECTIONS = 600
"""Six processes share a server, and some tests open a hundred connections."""
_NO_SYNC = {
    Postgres: {"fsync": "off", "full_page_writes": "off"},
    MariaDB: {"innodb-flush-log-at-trx-commit": "0", "innodb-flush-method": "nosync", "sync-frm": "0"},
}
"""No test kills these servers, so they need not wait for the disk. Tests that kill one have `mortal_postgres` or
`mortal_mariadb`, which are crash-safe."""
_MAKE = {
    Postgres: lambda: Postgres(max_connections=_CONNECTIONS, settings=_NO_SYNC[Postgres]),
    MariaDB: lambda: MariaDB(max_connections=_CONNECTIONS, settings=_NO_SYNC[MariaDB]),
    RabbitMQ: RabbitMQ,
}


class ServerPool:
    def __init__(self) -> None:
        self._servers: dict[type[Server], Server] = {}
        self._locks: dict[type[Server], threading.Lock] = defaultdict(threading.Lock)
        self._listener: Listener | None = None

    def listen(self) -> str:
        """Begin to answer other processes; returns the address for `ask`."""
        if self._listener is None:
            self._listener = Listener(family="AF_UNIX")
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return str(self._listener.address)

    def get(self, kind: type[Server]) -> Server:
        with self._locks[kind]:
            if kind not in self._servers:
                self._servers[kind] = _MAKE[kind]().start()
            return self._servers[kind]

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for server in self._servers.values():
            server.close()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            try:
                connection.send(self.get(connection.recv()))
            except Exception as e:
                connection.send(e)


def ask(address: str, kind: type[Server]) -> Server:
    """A server of the pool that listens at this address."""
    with Client(address) as connection:
        connection.send(kind)
        answer: Server | Exception = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer
