"""FastAPI: the lifespan of an application, once for each test client, and publishing in the session of a request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI
from httpx import ASGITransport, AsyncClient
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from millpond import Millpond
from millpond.integrations.fastapi import SessionPublisher, lifespan, publisher
from tests.waiting import until


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shop.db"


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[AsyncClient]:
    """A client within the lifespan of the application, as Starlette's TestClient has it."""
    async with (
        app.router.lifespan_context(app),
        AsyncClient(transport=ASGITransport(app), base_url="http://t") as client,
    ):
        yield client


def test_each_test_client_has_its_own_lifespan(url: str) -> None:
    pond = Millpond(url)
    handled: list[int] = []

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        handled.append(body)

    app = FastAPI(lifespan=lifespan(pond))

    @app.post("/{number}")
    async def take(number: int) -> bool:
        return (await pond.publish("q", number)).new

    async def use(number: int) -> None:
        async with client_of(app) as client:
            assert (await client.post(f"/{number}")).json() is True
            await until(lambda: number in handled)
        assert pond.worker is None

    asyncio.run(use(1))
    asyncio.run(use(2))
    assert handled == [1, 2]
    pond.close_sync()


async def test_without_work_nothing_is_handled(url: str) -> None:
    pond = Millpond(url)

    @pond.subscriber("q")
    async def handle(body: int) -> None:
        raise AssertionError("no worker runs here")

    engine = create_engine(url)

    def get_session() -> Iterator[Session]:
        with Session(engine) as session:
            yield session

    app = FastAPI(lifespan=lifespan(pond, work=False))

    @app.post("/{commit}")
    def take(
        commit: bool,
        session: Annotated[Session, Depends(get_session)],
        messages: Annotated[SessionPublisher, publisher(pond, get_session)],
    ) -> bool:
        assert messages.session is session
        new = messages.publish_sync("q", 1).new and messages.publish_many_sync("q", [2])[0].new
        if commit:
            session.commit()
        return new

    async with client_of(app) as client:
        assert (await client.post("/true")).json() and (await client.post("/false")).json()
        assert pond.worker is None
    (stats,) = await (await pond.transport).operations.count(["q"])
    assert stats.counts["PENDING"] == 2
    await pond.close()
    engine.dispose()


async def test_a_worker_that_ends_is_logged_at_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    pond = Millpond(url)

    @pond.on_start
    def fail() -> None:
        raise RuntimeError("no licence")

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    app = FastAPI(lifespan=lifespan(pond))
    with pytest.raises(RuntimeError, match="no licence"):
        async with client_of(app):
            await until(lambda: "the worker of this application ended" in caplog.text)
            assert pond.worker is None
    await pond.close()


async def test_a_lifespan_that_ends_before_its_worker_began(url: str) -> None:
    """Such as by an error of the application's own start."""
    pond = Millpond(url)

    @pond.subscriber("q")
    async def handle(body: int) -> None: ...

    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            async with lifespan(pond)(None):
                raise ZeroDivisionError
    assert pond.worker is None
    await pond.close()


async def test_many_messages_in_the_requests_transaction(url: str) -> None:
    pond = Millpond(url)
    await pond.transport
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with AsyncSession(engine) as session:
        messages = SessionPublisher(pond, session)
        await messages.publish_many("q", [1, 2])
        await session.rollback()
        await messages.publish_many("q", [3, 4, 5])
        await session.commit()
    await engine.dispose()
    (stats,) = await (await pond.transport).operations.count(["q"])
    assert stats.counts["PENDING"] == 3
    await pond.close()
