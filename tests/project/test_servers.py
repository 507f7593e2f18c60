"""Private servers: data survive a kill, and child processes end with their server."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest

from servers import MariaDB, PgBouncer, Postgres, Proxy, ServerError
from servers.processes import family, wait_until_gone
from servers.server import find_program

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """A server of this file, because tests kill it."""
    with Postgres() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDB]:
    with MariaDB() as server:
        yield server


def numbers(connection: psycopg.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT n FROM numbers ORDER BY n").fetchall()]


def test_postgres_data_survive_restart_and_kill(postgres: Postgres) -> None:
    url, port = postgres.create_database("survival"), postgres.port
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE numbers (n int)")
        connection.execute("INSERT INTO numbers VALUES (1)")
    postgres.restart()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO numbers VALUES (2)")
        processes = family(postgres.pid)
        assert len(processes) > 3  # its children count too
        postgres.kill()
        wait_until_gone(processes, timeout=0)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert not postgres.is_running()
    postgres.start()
    with psycopg.connect(url) as connection:
        assert numbers(connection) == [1, 2]
    assert postgres.port == port


def test_postgres_is_durable_by_default(postgres: Postgres) -> None:
    with postgres.connect() as connection:
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {name}").fetchone() == ("on",)


def test_another_process_uses_a_server_and_does_not_end_it(postgres: Postgres) -> None:
    code = "import pickle, sys; copy = pickle.load(sys.stdin.buffer).start(); copy.connect().close(); copy.close()"
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(postgres), check=True, timeout=60)
    postgres.connect().close()


def test_postgres_dsn_and_wrong_password(postgres: Postgres) -> None:
    with psycopg.connect(postgres.dsn) as connection:
        assert connection.info.port == postgres.port
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(postgres.url.replace(postgres.password, "wrong"))


def test_postgres_ssl() -> None:
    with Postgres(ssl=True) as server:
        verified = server.url_of("postgres", sslmode="verify-full", sslrootcert=str(server.certificate))
        with psycopg.connect(verified) as connection:
            assert connection.info.pgconn.ssl_in_use
        with pytest.raises(psycopg.OperationalError, match="no encryption"):
            psycopg.connect(server.url_of("postgres", sslmode="disable"))


def test_mariadb_data_survive_restart_and_kill(mariadb: MariaDB) -> None:
    mariadb.create_database("survival")
    mariadb.execute("CREATE TABLE survival.numbers (n int) ENGINE=InnoDB")
    mariadb.execute("INSERT INTO survival.numbers VALUES (1)")
    mariadb.restart()
    with mariadb.connect("survival") as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO numbers VALUES (2)")
        mariadb.kill()
        with pytest.raises(pymysql.OperationalError):
            cursor.execute("SELECT 1")
    mariadb.start()
    with mariadb.connect("survival") as connection, connection.cursor() as cursor:
        cursor.execute("SELECT n FROM numbers ORDER BY n")
        assert cursor.fetchall() == ((1,), (2,))


def test_mariadb_ssl() -> None:
    with MariaDB(ssl=True) as server:
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
            assert cursor.fetchone()[1]
        with pytest.raises(pymysql.OperationalError, match="denied"):
            pymysql.connect(**server.dsn, ssl_disabled=True)


def test_pgbouncer_changes_sessions_and_outlives_the_server(postgres: Postgres) -> None:
    with PgBouncer(postgres) as bouncer:
        with psycopg.connect(bouncer.url) as first, psycopg.connect(bouncer.url) as second:
            sessions = []
            for client in (first, second, first):  # the second client takes the first one's session
                sessions.append(client.execute("SELECT pg_backend_pid()").fetchone())
                client.commit()
            assert sessions[0] == sessions[1]
        postgres.kill()
        postgres.start()
        bouncer.kill()
        bouncer.start()
        with psycopg.connect(bouncer.url) as client:
            assert client.execute("SELECT 1").fetchone() == (1,)


def test_fresh_databases(postgres_url: str, mariadb_url: str, sqlite_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
    assert mariadb_url.startswith("mysql://")
    assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


def test_proxy_cuts_and_accepts_again(postgres: Postgres) -> None:
    with Proxy(postgres.port) as proxy:
        with psycopg.connect(proxy.url(postgres.url), autocommit=True) as connection:
            assert proxy.connections == 1
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(proxy.url(postgres.url))
        proxy.accept()
        psycopg.connect(proxy.url(postgres.url)).close()


def test_proxy_black_hole_holds_and_passes_on(postgres: Postgres) -> None:
    answered = threading.Event()

    def ask() -> None:
        connection.execute("SELECT 1")
        answered.set()

    with Proxy(postgres.port) as proxy, psycopg.connect(proxy.url(postgres.url)) as connection:
        proxy.black_hole()
        asking = threading.Thread(target=ask)
        asking.start()
        assert not answered.wait(0.3)
        proxy.resume()
        assert answered.wait(10)
        asking.join()


def test_proxy_loses_only_the_reply(postgres: Postgres) -> None:
    url = postgres.create_database("lost_reply")
    with psycopg.connect(url, autocommit=True) as direct, Proxy(postgres.port) as proxy:
        direct.execute("CREATE TABLE numbers (n int)")
        with psycopg.connect(proxy.url(url)) as connection, psycopg.connect(proxy.url(url)) as bystander:
            connection.execute("INSERT INTO numbers VALUES (1)")
            happened = proxy.cut_after(b"COMMIT")
            with pytest.raises(psycopg.OperationalError):
                connection.commit()
            assert happened.wait(10)
            assert numbers(direct) == [1]
            bystander.execute("INSERT INTO numbers VALUES (2)")
            bystander.commit()  # only one reply is lost
        assert numbers(direct) == [1, 2]


def test_missing_program_says_what_to_do() -> None:
    with pytest.raises(ServerError, match="scripts/debian-packages no-package=no-such-program"):
        find_program("no-such-program", "no-package")


def test_failed_start_shows_the_log() -> None:
    server = Postgres(settings={"max_connections": "many"})
    try:
        with pytest.raises(ServerError, match="max_connections"):
            server.start()
    finally:
        server.close()


def test_servers_end_with_a_killed_owner() -> None:
    program = (
        "from servers import Postgres; server = Postgres().start();"
        "print(server.pid, server.folder, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        pid, folder = owner.stdout.readline().split()
        processes = family(int(pid))
        os.kill(owner.pid, signal.SIGKILL)
    wait_until_gone(processes)
    give_up_at = time.monotonic() + 10
    while Path(folder).exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)
