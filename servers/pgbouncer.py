"""A private PgBouncer in front of a private PostgreSQL."""

import psycopg

from servers.postgres import Postgres
from servers.server import Server, find_program


class PgBouncer(Server):
    """Pools by transaction: two statements of one client may run in two sessions of the server."""

    name = "pgbouncer"
    account = "postgres"

    def __init__(self, postgres: Postgres, *, pool_size: int = 20, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.postgres = postgres
        self._settings = {
            "listen_addr": self.host,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": str(self.folder / "users"),
            "pool_mode": "transaction",
            "default_pool_size": str(pool_size),
            "max_client_conn": "1000",
            "server_tls_sslmode": "prefer",
            # Without this it refuses clients for 15 s after it once failed to reach the server.
            "server_login_retry": "1",
            "ignore_startup_parameters": "extra_float_digits",
            **(settings or {}),
        }

    def prepare(self) -> None:
        self.write("users", f'"{self.postgres.user}" "{self.postgres.password}"\n')
        settings = "".join(f"{name} = {value}\n" for name, value in self._settings.items())
        databases = f"* = host={self.postgres.host} port={self.postgres.port}\n"
        self.write("pgbouncer.ini", f"[databases]\n{databases}[pgbouncer]\n{settings}")

    def command(self) -> list[str]:
        return [find_program("pgbouncer", "pgbouncer"), str(self.folder / "pgbouncer.ini")]

    def ready(self) -> bool:
        try:
            psycopg.connect(self.url, autocommit=True, connect_timeout=10).close()
        except psycopg.OperationalError:
            return False
        return True

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        user = f"{self.postgres.user}:{self.postgres.password}"
        return f"postgresql://{user}@{self.host}:{self.port}/{database}"
