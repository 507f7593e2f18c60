"""Free loopback ports that stay ours while their server is down."""

import random
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"

_given: set[int] = set()


def free_port() -> int:
    # Below the range from which the kernel takes client ports: a client that tries to reach a server
    # that is down could otherwise be given that very port, and the server could not come back on it.
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest_client_port = int(range_file.read_text().split()[0]) if range_file.exists() else 32768
    for _ in range(1000):
        port = random.randrange(10_000, lowest_client_port)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError("no free loopback port found")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
