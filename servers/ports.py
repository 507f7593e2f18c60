"""Free loopback ports that stay reserved while their server is down."""

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
    # Below the range of the kernel's client ports: a client that tries to reach a stopped server could otherwise
    # get that port as its own, and the server could not listen on it again.
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest_client_port = int(range_file.read_text().split()[0]) if range_file.exists() else 32768
    for _ in range(1000):
        port = random.randrange(10_000, lowest_client_port)
        if _claim(port):
            return port
    raise RuntimeError("no free loopback port found")


def _claim(port: int) -> bool:
    """Another process may check the same port before the server starts. Therefore each reserves a name in the
    kernel's abstract namespace: only one process can have it, and it ends with the process."""
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
