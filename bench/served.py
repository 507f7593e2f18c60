"""A process `millpond serve` that is measured from outside."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bench.contestants import ROOT

_STOP_WITHIN = 60


@dataclass(frozen=True)
class Served:
    """Addresses of a server, and the number of its process."""

    url: str
    grpc_address: str
    pid: int


@asynccontextmanager
async def serving(url: str, *options: str) -> AsyncIterator[Served]:
    """A server of this database, with the limits that it has by default."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millpond", "serve", "--port", "0", "--grpc-port", "0", *options),
        stdout=PIPE,
        cwd=ROOT,
        env={**os.environ, "MILLPOND_URL": url},  # not as an argument: it contains a password
    )
    assert process.stdout is not None
    try:
        lines = [(await process.stdout.readline()).decode() for _ in range(2)]
        if not all(line.startswith("serving") for line in lines):
            raise RuntimeError("the server did not start")
        yield Served(lines[0].split()[1].removesuffix("/api/v1"), lines[1].split("//")[1].strip(), process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), _STOP_WITHIN)
