"""A private RabbitMQ broker."""

import base64
import contextlib
import json
import os
import secrets
import signal
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from servers.ports import free_port
from servers.server import Server, find_program

# Debian's start script supports one broker per machine; this script takes everything from the environment.
SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

_START = 'epmd -address "$ERL_EPMD_ADDRESS" -port "$ERL_EPMD_PORT" & exec "$0"'
"""A port mapper for this broker, in the foreground: it is a child process and ends with the others."""


class RabbitMQ(Server):
    """One node with the management API for virtual hosts and statistics; with and without TLS.

    `settings` are further lines of rabbitmq.conf.
    """

    name = "rabbitmq"
    account = "rabbitmq"

    def __init__(self, *, settings: dict[str, str] | None = None) -> None:
        super().__init__()
        self.user = "millpond"
        self.password = secrets.token_urlsafe(16)
        self.management_port, self.tls_port = free_port(), free_port()
        self._mapper_port, self._distribution_port = free_port(), free_port()
        self._settings = {
            "listeners.tcp.local": f"{self.host}:{self.port}",
            "management.tcp.ip": self.host,
            "management.tcp.port": str(self.management_port),
            "default_user": self.user,
            "default_pass": self.password,
            "log.console": "true",
            "log.console.level": "warning",
            "log.file": "false",
            # Fixed limits of memory and disk: the load of the machine must not matter.
            "vm_memory_high_watermark.absolute": "2GB",
            "disk_free_limit.absolute": "10MB",
            **(settings or {}),
        }

    def prepare(self) -> None:
        self.certificate, key = self.make_certificate()
        self._settings |= {
            "listeners.ssl.local": f"{self.host}:{self.tls_port}",
            "ssl_options.certfile": str(self.certificate),
            "ssl_options.keyfile": str(key),
        }
        self.write("rabbitmq.conf", "".join(f"{name} = {value}\n" for name, value in self._settings.items()))
        self.write("plugins", "[rabbitmq_management].\n")
        self.write(".erlang.cookie", secrets.token_hex(16)).chmod(0o400)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing from this process, and nothing from the machine's own broker."""
        return {
            "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "HOME": str(self.folder),
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_FLAGS": "-start_epmd false",
            "RABBITMQ_NODENAME": f"millpond{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            # Run the virtual machine itself, not a shell that passes signals on.
            "RUNNING_UNDER_SYSTEMD": "1",
        }

    def command(self) -> list[str]:
        find_program("rabbitmq-server", "rabbitmq-server")
        return ["env", "-i", *self._assignments(), "/bin/sh", "-c", _START, str(SCRIPT)]

    def ready(self) -> bool:
        listeners = [f"port-listener/{port}" for port in (self.port, self.tls_port)]
        try:  # an unhealthy check has no success status
            for check in ("virtual-hosts", *listeners):
                self.ask("GET", f"/health/checks/{check}")
        except OSError:
            return False
        return True

    def stop(self, timeout: float = 30) -> None:
        group = self.pid if self.is_running() else None
        super().stop(timeout)
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # the port mapper

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        return f"amqp://{self.user}:{self.password}@{self.host}:{self.port}/{quote(vhost, safe='')}"

    def tls_url_of(self, vhost: str) -> str:
        """The URL for TLS; the certificate is self-signed."""
        return self.url_of(vhost).replace("amqp:", "amqps:", 1).replace(f":{self.port}/", f":{self.tls_port}/")

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The management API."""
        login = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        request = urllib.request.Request(
            f"http://{self.host}:{self.management_port}/api{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {login}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def create_vhost(self, name: str) -> str:
        self.ask("PUT", f"/vhosts/{quote(name, safe='')}")
        return self.url_of(name)

    def drop_vhost(self, name: str) -> None:
        self.ask("DELETE", f"/vhosts/{quote(name, safe='')}")

    def note_queues(self) -> None:
        """Make the broker store its list of quorum queues. Otherwise it does so after a pause without changes, and
        after an earlier kill the newest queues are missing."""
        self.control("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")

    def control(self, *arguments: str) -> None:
        """Run rabbitmqctl, where the management API is not enough; takes one or two seconds."""
        self.run("env", "-i", *self._assignments(), str(SCRIPT.with_name("rabbitmqctl")), *arguments)

    def _assignments(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environment.items()]
