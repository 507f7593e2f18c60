"""Free loopback ports that stay ours while their server is down."""

import atexit
import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"

_claims: list[socket.socket] = []


@atexit.register
def _let_go() -> None:
    for claim in _claims:
        claim.close()


def free_port() -> int:
    # Below the range from which the kernel takes client ports: a client that tries to reach a server
    # that is down could otherwise be given that very port, and the server could not come back on it.
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest_client_port = int(range_file.read_text().split()[0]) if range_file.exists() else 32768
    for _ in range(1000):
        port = random.randrange(10_000, lowest_client_port)
        if _claim(port):
            return port
    raise RuntimeError("no free loopback port found")


def _claim(port: int) -> bool:
    """Between the look and the server's start another process may look too, so each leaves a name in the kernel's
    abstract namespace, which only one can have and which goes with its process."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0millpond-port-{port}")
        with socket.socket() as probe:
            probe.bind((LOOPBACK, port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
