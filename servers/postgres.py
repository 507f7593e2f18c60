"""A private PostgreSQL server."""

import contextlib
import secrets
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import psycopg
from psycopg import sql

from servers.server import Server, find_program


class Postgres(Server):
    """Crash-safe settings (fsync on), password login over TCP; with `ssl`, TLS only.

    The superuser is `millpond`; `settings` are further lines of postgresql.conf.
    """

    name = "postgres"
    account = "postgres"
    # "Fast" shutdown: ends the sessions instead of waiting for them.
    stop_signal = signal.SIGINT

    def __init__(
        self,
        *,
        ssl: bool = False,
        shared_buffers: str = "128MB",
        max_connections: int = 200,
        settings: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.user = "millpond"
        self.password = secrets.token_urlsafe(16)
        self.ssl = ssl
        self.certificate: Path | None = None
        self.data = self.folder / "data"
        self._shared_memory_id: str | None = None
        self._settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "max_connections": str(max_connections),
            "shared_buffers": shared_buffers,
            # In the data folder: /dev/shm stays clean after a kill.
            "dynamic_shared_memory_type": "mmap",
            **(settings or {}),
        }

    def prepare(self) -> None:
        password_file = self.write("password", self.password)
        self.run(
            *(find_program("initdb", "postgresql"), "--pgdata", str(self.data), "--username", self.user),
            *("--pwfile", str(password_file), "--auth", "scram-sha-256"),
            *("--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
        )
        password_file.unlink()
        if self.ssl:
            self.certificate, key = self.make_certificate()
            self._settings |= {"ssl": "on", "ssl_cert_file": str(self.certificate), "ssl_key_file": str(key)}
            hosts = "local all all scram-sha-256\nhostssl all all all scram-sha-256\n"
            (self.data / "pg_hba.conf").write_text(hosts)
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())

    def command(self) -> list[str]:
        return [find_program("postgres", "postgresql"), "-D", str(self.data)]

    def ready(self) -> bool:
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        self._shared_memory_id = (self.data / "postmaster.pid").read_text().split("\n")[6].split()[1]
        return True

    def kill(self) -> None:
        was_running = self.is_running()
        super().kill()
        if was_running:
            # Without processes these files protect nothing. Left behind, they would stop the next start if another
            # process has the old process id.
            (self.data / "postmaster.pid").unlink(missing_ok=True)
            (self.folder / f".s.PGSQL.{self.port}.lock").unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        if self._shared_memory_id and not self.folder.exists():
            # A killed server leaves a small System V segment, of which the kernel has a limited number.
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ipcrm", "-m", self._shared_memory_id], capture_output=True, check=False)
            self._shared_memory_id = None

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str, **options: str) -> str:
        query = f"?{urlencode(options)}" if options else ""
        return f"postgresql://{self.user}:{self.password}@{self.host}:{self.port}/{database}{query}"

    @property
    def dsn(self) -> str:
        """The same as `url`, in the other form of libpq."""
        return f"host={self.host} port={self.port} user={self.user} password={self.password} dbname=postgres"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self.url_of(database), autocommit=True, connect_timeout=10)

    def create_database(self, name: str) -> str:
        with self.connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and end its sessions."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
