"""The driver's side of handlers on Spark: one job for each worker, and the connections that their tasks hold."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millpond.errors import InvalidOption
from millpond.spark.local import is_local
from millpond.spark.task import BEAT, EVERY, RUN, SILENT, STOP, Ended, Hello, Order, keep_worker
from millpond.worker.crew import Crew, Place

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger("millpond.run")


class _TaskPlace(Place):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.turn = asyncio.Lock()
        """Held by the connection that works. A second copy of a task, by speculation, or after an executor seemed to
        be dead, waits for the first to end."""
        self.writer: asyncio.StreamWriter | None = None
        self.tag = f"millpond-{secrets.token_hex(8)}"


class Tasks(Crew):
    """A crew in tasks of Spark.

    A job for each place: one job of several tasks would end all of them when one has failed too often.
    """

    def __init__(
        self,
        context: SparkContext,
        target: str,
        arguments: Sequence[str],
        tasks: int,
        *,
        grace: float,
        until_idle: bool,
        port: int,
    ) -> None:
        super().__init__(tasks, grace=grace, until_idle=until_idle)
        self._context = context
        self._target = target
        self._arguments = tuple(arguments)
        self._token = secrets.token_hex(16)
        settings = context.getConf()
        self._host = settings.get("spark.driver.host", "127.0.0.1")
        self._bind = settings.get("spark.driver.bindAddress", self._host)
        self._port = port
        self._path = tuple(sys.path) if is_local(str(context.master)) else ()
        self._connected: set[asyncio.StreamWriter] = set()
        self._threads = ThreadPoolExecutor(tasks, thread_name_prefix="millpond-spark")

    def _place(self, number: int) -> _TaskPlace:
        return _TaskPlace(number)

    async def run(self) -> int:
        async with self._listening():
            try:
                return await super().run()
            finally:
                self._threads.shutdown(wait=False)

    def _tell_to_stop(self, place: Place) -> None:
        assert isinstance(place, _TaskPlace)
        if place.writer is not None and self._signals < 3:
            place.writer.write(STOP)
        else:  # it waits for a core, or for somebody else's task to end
            self._cancel(place)

    # --- Spark's jobs -------------------------------------------------------------------------------

    async def _live(self, place: Place) -> int:
        assert isinstance(place, _TaskPlace)
        place.last_words = ""
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._job, place)
        killed = False
        try:
            while not (await asyncio.wait([job], timeout=0.5))[0]:
                if self._stopping.is_set() and (self._time_is_over or not place.taken):
                    killed = place.taken
                    self._cancel(place)
            code, place.last_words = await job
        except asyncio.CancelledError:
            self._cancel(place)
            raise
        except Exception as e:
            place.last_words = _brief(e)
            if self._stopping.is_set():
                return -signal.SIGKILL if killed else 0
            code = 1
            if self._spark_has_stopped():
                place.last_words = f"Spark has stopped: {place.last_words}"
                self._code = 1
                self.stop()
        return code

    def _job(self, place: _TaskPlace) -> Ended:
        """Runs in a thread, as long as the task lasts."""
        context = self._context
        order = Order(place.number, self._host, self._port, self._token, self._arguments, self._path, self._grace)
        context.clearJobTags()
        context.addJobTag(place.tag)
        context.setJobDescription(f"millpond: worker {place.number} of {self._target}")
        task = context.parallelize([place.number], 1).mapPartitions(functools.partial(keep_worker, order))
        return Ended(*task.collect()[0])

    def _cancel(self, place: _TaskPlace) -> None:
        with contextlib.suppress(Exception):  # Spark may be gone
            self._context.cancelJobsWithTag(place.tag)

    def _spark_has_stopped(self) -> bool:
        try:
            java = cast(Any, self._context)._jsc
            return java is None or bool(java.sc().isStopped())
        except Exception:  # the JVM is gone
            return True

    # --- the tasks' connections ---------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        try:
            server = await asyncio.start_server(self._serve, self._bind, self._port)
        except OSError as e:
            raise InvalidOption(
                f"the tasks connect to the driver, and it cannot listen on {self._bind}, port {self._port or 'any'}: "
                f"{e.strerror or e}; see spark.driver.bindAddress"
            ) from e
        self._port = server.sockets[0].getsockname()[1]
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            server.close()
            for writer in list(self._connected):
                writer.close()

    async def _beat(self) -> None:
        while True:
            for writer in self._connected:
                writer.write(BEAT)
            await asyncio.sleep(EVERY)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SILENT):
                hello = msgspec.json.decode(await reader.readline(), type=Hello)
            if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
                return
            place = cast(_TaskPlace, self._places[hello.place - 1])
            self._connected.add(writer)
            async with place.turn:
                await self._hear(place, hello.host, reader, writer)
        except (OSError, TimeoutError, ValueError):  # gone, or none of our tasks
            pass
        finally:
            self._connected.discard(writer)
            writer.close()

    async def _hear(
        self, place: _TaskPlace, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._stopping.is_set():
            writer.write(STOP)
            return
        writer.write(RUN)
        place.taken, place.writer = True, writer
        log.info("worker %d runs on %s", place.number, host)
        try:
            while True:
                async with asyncio.timeout(SILENT):
                    line = await reader.readline()
                if not line:
                    return
                place.hear(line)
        finally:
            place.writer = None
            place.leave()


def _brief(error: Exception) -> str:
    """The first lines of Spark's long stories."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
