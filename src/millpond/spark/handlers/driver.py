"""The driver's side of handlers on Spark: one job for each worker, and the connections from its task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import secrets
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millpond.errors import InvalidOption
from millpond.spark.handlers.certificate import is_wanted, server_context
from millpond.spark.handlers.executor import BEAT, EVERY, RUN, SILENT, STOP, Ended, Hello, TaskOrder, keep_worker
from millpond.spark.sessions import is_local
from millpond.worker.supervisor import Supervisor, WorkerSlot

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger("millpond.run")


class _TaskSlot(WorkerSlot):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.lock = asyncio.Lock()
        """Held by the connection of the running worker. A second copy of the task, by speculation or after an executor
        seemed dead, waits until the first has ended."""
        self.writer: asyncio.StreamWriter | None = None
        self.tag = f"millpond-{secrets.token_hex(8)}"


class TaskSupervisor(Supervisor):
    """Supervises workers in tasks of Spark.

    Each worker has a job: one job of several tasks would end all of them when one has failed too often.
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
        self._tls: ssl.SSLContext | None = None
        self._certificate = ""
        if is_wanted(settings.get):
            self._tls, self._certificate = server_context()
        self._path = tuple(sys.path) if is_local(str(context.master)) else ()
        self._connected: set[asyncio.StreamWriter] = set()
        self._threads = ThreadPoolExecutor(tasks, thread_name_prefix="millpond-spark")

    def _new_slot(self, number: int) -> _TaskSlot:
        return _TaskSlot(number)

    async def run(self) -> int:
        async with self._listening():
            try:
                return await super().run()
            finally:
                self._threads.shutdown(wait=False)

    def _send_stop(self, slot: WorkerSlot) -> None:
        assert isinstance(slot, _TaskSlot)
        if slot.writer is not None and self._stops < 3:
            slot.writer.write(STOP)
        else:  # the job waits for a core, or for another copy of its task to end
            self._cancel(slot)

    async def _run_worker(self, slot: WorkerSlot) -> int:
        assert isinstance(slot, _TaskSlot)
        slot.last_output = ""
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._job, slot)
        killed = False
        try:
            while not (await asyncio.wait([job], timeout=0.5))[0]:
                if self._stopping.is_set() and (self._must_kill or not slot.occupied):
                    killed = slot.occupied
                    self._cancel(slot)
            code, slot.last_output = await job
        except asyncio.CancelledError:
            self._cancel(slot)
            raise
        except Exception as e:
            slot.last_output = _brief(e)
            if self._stopping.is_set():
                return -signal.SIGKILL if killed else 0
            code = 1
            if self._spark_has_stopped():
                slot.last_output = f"Spark has stopped: {slot.last_output}"
                self._code = 1
                self.stop()
        return code

    def _job(self, slot: _TaskSlot) -> Ended:
        """Run the job in a thread, until its task ends."""
        context = self._context
        order = TaskOrder(slot.number, self._host, self._port, self._token, self._arguments, self._path, self._grace)
        order = order._replace(certificate=self._certificate)
        context.clearJobTags()
        context.addJobTag(slot.tag)
        context.setJobDescription(f"millpond: worker {slot.number} of {self._target}")
        task = context.parallelize([slot.number], 1).mapPartitions(functools.partial(keep_worker, order))
        return Ended(*task.collect()[0])

    def _cancel(self, slot: _TaskSlot) -> None:
        with contextlib.suppress(Exception):  # Spark may be gone
            self._context.cancelJobsWithTag(slot.tag)

    def _spark_has_stopped(self) -> bool:
        try:
            java = cast(Any, self._context)._jsc
            return java is None or bool(java.sc().isStopped())
        except Exception:  # the JVM is gone
            return True

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        try:
            server = await asyncio.start_server(self._serve, self._bind, self._port, ssl=self._tls)
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
            slot = cast(_TaskSlot, self._slots[hello.slot - 1])
            self._connected.add(writer)
            async with slot.lock:
                await self._read_statuses(slot, hello.host, reader, writer)
        except (OSError, TimeoutError, ValueError):  # the connection is gone, or is not one of our tasks
            pass
        finally:
            self._connected.discard(writer)
            writer.close()

    async def _read_statuses(
        self, slot: _TaskSlot, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._stopping.is_set():
            writer.write(STOP)
            return
        writer.write(RUN)
        slot.occupied, slot.writer = True, writer
        log.info("worker %d runs on %s", slot.number, host)
        try:
            while True:
                async with asyncio.timeout(SILENT):
                    line = await reader.readline()
                if not line:
                    return
                slot.receive_status(line)
        finally:
            slot.writer = None
            slot.clear()


def _brief(error: Exception) -> str:
    """The first lines of Spark's long error text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__
