"""FastAPI: a worker for the lifespan of the application, and a dependency that publishes in the request's session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Unpack

from fastapi import Depends

from millpond.ids import PublishedId
from millpond.pond import Millpond
from millpond.publishing import PublishManyOptions, PublishOptions

log = logging.getLogger("millpond.fastapi")


class SessionPublisher:
    """Publishes in one request's transaction: the messages appear when its session commits."""

    def __init__(self, pond: Millpond, session: Any) -> None:
        self._pond = pond
        self.session = session

    async def publish(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId:
        options["within"] = self.session
        return await self._pond.publish(queue, body, **options)

    async def publish_many(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        options["within"] = self.session
        return await self._pond.publish_many(queue, bodies, **options)

    def publish_sync(self, queue: str, body: Any, **options: Unpack[PublishOptions]) -> PublishedId:
        """For endpoints without `async`, whose session is a synchronous one."""
        options["within"] = self.session
        return self._pond.publish_sync(queue, body, **options)

    def publish_many_sync(
        self, queue: str, bodies: Iterable[Any], **options: Unpack[PublishManyOptions]
    ) -> list[PublishedId]:
        options["within"] = self.session
        return self._pond.publish_many_sync(queue, bodies, **options)


def publisher(pond: Millpond, session: Callable[..., Any]) -> Any:
    """The dependency: `publisher: Annotated[SessionPublisher, publisher(pond, get_session)]`.

    `session` is your own dependency. FastAPI calls it once for each request, so endpoint and publisher share it.
    """

    def of_request(session: Any = Depends(session)) -> SessionPublisher:  # noqa: B008 - FastAPI reads it there
        return SessionPublisher(pond, session)

    return Depends(of_request)


def lifespan(pond: Millpond, *, work: bool = True) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan that connects the pond, runs its subscribers and stops them: `FastAPI(lifespan=lifespan(pond))`.

    With `work=False` it only connects: workers are other processes. A worker that ends with an error is logged at
    once, and raises when the lifespan ends; `pond.worker` is None then. The lifespan may begin again, as in each test
    with a `TestClient`.
    """

    @asynccontextmanager
    async def connected(app: Any) -> AsyncIterator[None]:
        await pond.transport  # a wrong URL or missing tables end the start
        worker = asyncio.create_task(pond.run()) if work else None
        if worker is not None:
            worker.add_done_callback(_log_failure)
        try:
            await asyncio.sleep(0)  # the run begins: before that `stop` has no effect
            yield
        finally:
            try:
                if worker is not None:
                    pond.stop()
                    await worker
            finally:
                await pond.disconnect()

    return connected


def _log_failure(worker: asyncio.Task[None]) -> None:
    if not worker.cancelled() and (error := worker.exception()) is not None:
        log.error("the worker of this application ended: no message is handled any more", exc_info=error)
