"""An empty pond on every backend, and helpers that run it and read its messages."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from millpond import GiveBack, Millpond, Row, State
from tests.shared import empty_database
from tests.waiting import SOON, until

DATABASES = {"sqlite": "sqlite", "postgresql": "postgres", "mariadb": "mariadb"}
"""Name of a backend here, and of its database in `tests.shared`."""
BACKENDS = ["memory", *DATABASES]


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest) -> str:
    """Every backend, without a message; `@pytest.mark.parametrize("url", […], indirect=True)` selects some."""
    if request.param == "memory":
        return f"memory://{uuid4().hex}"
    return empty_database(request, DATABASES[request.param])


@pytest.fixture
async def make_pond(url: str) -> AsyncIterator[Callable[..., Millpond]]:
    """Ponds over the same messages; all are closed after the test."""
    made: list[Millpond] = []

    def make(**options: Any) -> Millpond:
        made.append(Millpond(url, **options))
        return made[-1]

    yield make
    for pond in made:
        await pond.close()


@pytest.fixture
def pond(make_pond: Callable[..., Millpond]) -> Millpond:
    return make_pond()


on = lambda *backends: pytest.mark.parametrize("url", backends, indirect=True)  # noqa: E731
"""Only these backends: for slow tests, and for abilities that only some have."""


@asynccontextmanager
async def working(pond: Millpond, **options: Any) -> AsyncIterator[None]:
    """Run the pond while the context lasts, then stop it as one signal does."""
    run = asyncio.create_task(pond.run(**{"signals": False, "graceful_timeout": 5, **options}))
    await until(lambda: run.done() or (pond.worker is not None and pond.worker.claiming.is_set()))
    if run.done():
        run.result()
    try:
        yield
    finally:
        pond.stop()
        async with asyncio.timeout(SOON):
            await run


async def suspect(
    pond: Millpond, queue: str, body: Any, *, crashes: int = 2, due_in: float = 0, **options: Any
) -> UUID:
    """Publish a message whose workers died. Call it while no worker runs."""
    transport = await pond.transport
    id_ = await pond.publish(queue, body, **options)
    for n in range(1, crashes + 1):
        (claim,) = await transport.claim([queue], ids=[id_])
        back = GiveBack(claim.receipt, crashed=True, delay=due_in if n == crashes else 0)
        assert await transport.settle([back]) == []
    return id_


async def row(pond: Millpond, id_: UUID) -> Row:
    (found,) = await (await pond.transport).operations.find([id_])
    return found


async def became(pond: Millpond, id_: UUID, state: State, within: float = SOON) -> Row:
    """The message, once it is in this state."""

    async def look() -> Row | None:
        found = await (await pond.transport).operations.find([id_])
        return found[0] if found and found[0].state is state else None

    found: Row = await until(look, within=within)
    return found


async def counts(pond: Millpond, queue: str = "q") -> dict[State, int]:
    """Number of messages in each state, without zeros."""
    (stats,) = await (await pond.transport).operations.count([queue])
    return {state: number for state, number in stats.counts.items() if number}


async def drained(pond: Millpond, queue: str = "q", within: float = SOON) -> dict[State, int]:
    """The counts, once no message waits or runs."""

    async def look() -> list[dict[State, int]]:
        now = await counts(pond, queue)
        return [] if set(now) & {State.PENDING, State.PROCESSING, State.RETRYABLE} else [now]

    (found,) = await until(look, within=within)
    return dict(found)
