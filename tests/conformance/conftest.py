"""The fixtures of the suite: a clock that stands still, and every transport in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from millpond import Capability, ManualClock, Store
from tests.conformance.backends import BACKENDS, Backend
from tests.stores import clock, handles

Connect = Callable[..., Awaitable[Store]]

__all__ = ["clock"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires(capability): runs only over transports that have it")


@pytest.fixture(scope="session", params=BACKENDS)
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
    async with handles(backend, clock) as connect:
        yield connect


@pytest.fixture
async def transport(connect: Connect) -> Store:
    return await connect()


async def capabilities(backend: Backend, clock: ManualClock) -> Capability:
    """Asked once of each."""
    if backend not in _known:
        transport = await backend.connect(clock=clock)
        _known[backend] = transport.capabilities
        await transport.close()
    return _known[backend]


_known: dict[Backend, Capability] = {}
