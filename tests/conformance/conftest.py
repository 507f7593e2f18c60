"""The fixtures of the suite: a clock that stands still, and every transport in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from millpond import Capability, ManualClock, Transport
from tests.conformance.backends import BACKENDS, Backend
from tests.patience import patient_shards
from tests.stores import clock, handles

Connect = Callable[..., Awaitable[Transport]]

__all__ = ["clock"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(capability): runs only over transports that have it")


LONG = ("postgres_shards", "mixed_postgres_shards")
"""Every call goes to three databases. `make test` has three shards on SQLite, and tests/shards has them on servers."""


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in BACKENDS]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from BACKENDS[request.param](request)


@pytest.fixture
async def connect(backend: Backend, clock: ManualClock, request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Handles that share their messages; all are closed after the test."""
    backend.empty()
    for mark in request.node.iter_markers("requires"):
        (capability,) = mark.args
        if capability not in await capabilities(backend, clock):
            pytest.skip(f"lacks {capability}")
    with patient_shards():
        async with handles(backend, clock) as connect:
            yield connect


@pytest.fixture
async def transport(connect: Connect) -> Transport:
    return await connect()


async def capabilities(backend: Backend, clock: ManualClock) -> Capability:
    """The capabilities of a backend, read once from its transport."""
    if backend not in _known:
        transport = await backend.connect(clock=clock)
        _known[backend] = transport.capabilities
        await transport.close()
    return _known[backend]


_known: dict[Backend, Capability] = {}
