"""A private MariaDB server."""

import secrets
from pathlib import Path
from typing import Any

import pymysql

from servers.server import Server, find_program


class MariaDB(Server):
    """Crash-safe settings, password login over TCP; with `ssl`, TLS only.

    Runs without a settings file, with the compiled-in character set and SQL mode: Millpond must not depend on
    Debian's more lenient ones. `settings` are further options of mariadbd.
    """

    name = "mariadb"
    account = "mysql"

    def __init__(
        self, *, ssl: bool = False, max_connections: int = 200, settings: dict[str, str] | None = None
    ) -> None:
        super().__init__()
        self.user = "millpond"
        self.password = secrets.token_urlsafe(16)
        self.ssl = ssl
        self.certificate: Path | None = None
        self.data = self.folder / "data"
        self._settings = {
            "bind-address": self.host,
            "port": str(self.port),
            "socket": str(self.folder / "socket"),
            "pid-file": str(self.folder / "pid"),
            # Not shared: a starting server removes temporary files, also those of another server.
            "tmpdir": str(self.folder),
            "max-connections": str(max_connections),
            "innodb-buffer-pool-size": "128M",
            "innodb-log-file-size": "64M",
            "innodb-flush-log-at-trx-commit": "1",
            # Logins are for the loopback address; without this the server would resolve names on the network.
            "skip-name-resolve": "1",
            **(settings or {}),
        }

    def prepare(self) -> None:
        account = f"'{self.user}'@'{self.host}'"
        statements = self.write(
            "accounts.sql",
            "FLUSH PRIVILEGES;\n"  # accounts must be read before new ones can be made
            f"CREATE USER {account} IDENTIFIED BY '{self.password}';\n"
            f"GRANT ALL ON *.* TO {account} WITH GRANT OPTION;\n"
            "CREATE DATABASE millpond;\n",
        )
        # Here, not at each start: accounts are in Aria tables, whose recovery after a kill is no subject of the tests.
        self.run(
            *(find_program("mariadb-install-db", "mariadb-server"), "--no-defaults"),
            *(f"--datadir={self.data}", "--auth-root-authentication-method=socket", "--skip-test-db"),
            f"--extra-file={statements}",
        )
        if self.ssl:
            self.certificate, key = self.make_certificate()
            self._settings |= {
                "ssl-cert": str(self.certificate),
                "ssl-key": str(key),
                "require-secure-transport": "1",
            }

    def command(self) -> list[str]:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        program = find_program("mariadbd", "mariadb-server")
        return [program, "--no-defaults", f"--datadir={self.data}", *settings]

    def ready(self) -> bool:
        try:
            self.connect().close()
        except pymysql.OperationalError:
            return False
        return True

    @property
    def url(self) -> str:
        return self.url_of("millpond")

    def url_of(self, database: str) -> str:
        return f"mysql://{self.user}:{self.password}@{self.host}:{self.port}/{database}"

    @property
    def dsn(self) -> dict[str, Any]:
        """Keywords for the Python drivers, without the database."""
        return {"host": self.host, "port": self.port, "user": self.user, "password": self.password}

    def connect(self, database: str | None = None) -> Any:
        ssl = {"ssl_ca": str(self.certificate)} if self.ssl else {}
        return pymysql.connect(**self.dsn, database=database, autocommit=True, **ssl)

    def execute(self, statement: str) -> None:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def create_database(self, name: str) -> str:
        self.execute(f"CREATE DATABASE `{name}`")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")
