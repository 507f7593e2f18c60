"""Base of all private servers: a folder, a port, a process with its children."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from servers.guard import Guard
from servers.ports import LOOPBACK, free_port
from servers.processes import family, wait_until_gone

FORBIDDEN = "MILLPOND_NO_SERVERS"
"""Set to 1, this variable turns the start of a server into an error (`make check`)."""


class ServerError(Exception):
    """A server program is missing, did not start, or did not stop."""


class Server:
    """One server. `start` after `stop` or `kill` comes back on the same port with the same data."""

    name: str
    # Database servers refuse to run as root; their package brings this account.
    account: str
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.host = LOOPBACK
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"millpond-{self.name}-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._prepared = False
        self._own(self.folder)
        self._guard = Guard(self.folder)
        self._owner_pid = os.getpid()
        atexit.register(self.close)

    # Defined by each server.

    def prepare(self) -> None:
        """Make the data folder and the settings; called once, before the first start."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether a client could work now."""
        raise NotImplementedError

    # For users of a server.

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._pid is None:
            raise ServerError(f"{self.name} is not running")
        return self._pid

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self, timeout: float = 100) -> Self:
        if self.is_running() or not self._is_owner():
            return self
        if os.environ.get(FORBIDDEN):
            raise ServerError(f"{FORBIDDEN} is set, but {self.name} is needed: mark the test with `server` or `java`")
        if not self._prepared:
            self.prepare()
            self._prepared = True
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                user=self._account(),
                group=self._account(),
                extra_groups=[] if self._account() else None,
            )
        self._pid = self._process.pid
        self._guard.watch(self._pid)
        give_up_at = time.monotonic() + timeout
        while not self.ready():
            if not self.is_running() or time.monotonic() > give_up_at:
                state = "is still not ready" if self.is_running() else "ended"
                self.kill()
                raise ServerError(f"{self.name} {state} after its start; its log ends:\n{self._log_tail()}")
            time.sleep(0.02)
        return self

    def stop(self, timeout: float = 30) -> None:
        """Shut down in the regular way; the data stay."""
        if self._process is None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"{self.name} did not stop in {timeout} s and was killed") from None
        self._ended()

    def kill(self) -> None:
        """SIGKILL the server and all its children at once, like a power cut."""
        if self._process is None:
            return
        # Stopped first, because it could fork another child while the list is made.
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)
        pids = family(self._process.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_until_gone(pids)
        self._ended()

    def restart(self) -> Self:
        self.stop()
        return self.start()

    def close(self) -> None:
        """End the server and remove its data. Also called at exit."""
        if not self._is_owner():
            return
        atexit.unregister(self.close)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._guard.dismiss()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process can use the server. It can neither start nor end it."""
        return {**self.__dict__, "_process": None, "_guard": None}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the servers.

    def run(self, *command: str) -> None:
        """Run a program of the set-up to its end, as the server's account."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            # Not shared: mariadb-install-db removes temporary files, also those of another server.
            env={**os.environ, "TMPDIR": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
            user=self._account(),
            group=self._account(),
            extra_groups=[] if self._account() else None,
        )
        if done.returncode:
            raise ServerError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")

    def write(self, name: str, text: str) -> Path:
        """Write a settings file that only the server may read."""
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)
        self._own(path)
        return path

    def make_certificate(self) -> tuple[Path, Path]:
        """A self-signed certificate for the loopback address, and its key."""
        certificate, key = self.folder / "server.crt", self.folder / "server.key"
        self.run(
            *(find_program("openssl", "openssl"), "req", "-x509", "-nodes", "-days", "30"),
            *("-newkey", "rsa:2048", "-subj", "/CN=localhost"),
            *("-addext", f"subjectAltName=DNS:localhost,IP:{self.host}"),
            *("-out", str(certificate), "-keyout", str(key)),
        )
        key.chmod(0o600)
        return certificate, key

    def _is_owner(self) -> bool:
        """False in a forked child and in a copy that another process has received."""
        return os.getpid() == self._owner_pid

    def _ended(self) -> None:
        self._process = self._pid = None
        self._guard.watch(None)

    def _account(self) -> str | None:
        return self.account if os.geteuid() == 0 else None

    def _own(self, path: Path) -> None:
        if account := self._account():
            try:
                shutil.chown(path, account, account)
            except LookupError:
                raise ServerError(f"no account {account!r}: is the {self.name} package installed?") from None

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def find_program(name: str, package: str) -> str:
    """The path of a server program, also outside PATH where Debian keeps some."""
    newest_first = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    places = [os.environ.get("PATH", ""), "/usr/sbin", "/sbin", *map(str, newest_first)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        raise ServerError(f"{name} is not installed: run `scripts/debian-packages {package}={name}`")
    return found


def _version(folder: Path) -> int:
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0
