"""A pond on every backend in turn, each test's empty; and short ways to let it work and see what became of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from millpond import Millpond, Row, State
from tests.shared import empty_database
from tests.waiting import SOON, until

DATABASES = ["sqlite", "postgresql", "mariadb"]
BACKENDS = ["memory", *DATABASES]


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest) -> str:
    """Every backend in turn, without a message; `@pytest.mark.parametrize("url", […], indirect=True)` takes some."""
    if request.param == "memory":
        return f"memory://{uuid4().hex}"
    return empty_database(request, request.param.removesuffix("ql"))


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
"""Only these backends: for what is slow, or what only some can do."""


@asynccontextmanager
async def working(pond: Millpond, **options: Any) -> AsyncIterator[None]:
    """The pond runs as long as this lasts, and is then stopped as by one signal."""
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


async def row(pond: Millpond, id_: UUID) -> Row:
    (found,) = await (await pond.transport).find([id_])  # type: ignore[attr-defined]
    return found


async def became(pond: Millpond, id_: UUID, state: State, within: float = SOON) -> Row:
    """The message, once it is in this state."""

    async def look() -> Row | None:
        found = await (await pond.transport).find([id_])  # type: ignore[attr-defined]
        return found[0] if found and found[0].state is state else None

    found: Row = await until(look, within=within)
    return found


async def counts(pond: Millpond, queue: str = "q") -> dict[State, int]:
    """How many messages are in each state, without the zeros."""
    (stats,) = await (await pond.transport).count([queue])  # type: ignore[attr-defined]
    return {state: number for state, number in stats.counts.items() if number}


async def drained(pond: Millpond, queue: str = "q", within: float = SOON) -> dict[State, int]:
    """The counts, once nothing waits and nothing runs."""

    async def look() -> list[dict[State, int]]:
        now = await counts(pond, queue)
        return [] if set(now) & {State.PENDING, State.PROCESSING, State.RETRYABLE} else [now]

    (found,) = await until(look, within=within)
    return dict(found)
