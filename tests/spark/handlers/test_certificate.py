"""The connection between driver and tasks follows Spark's encryption. No Java is needed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from millpond.spark.handlers.certificate import server_context
from millpond.spark.handlers.driver import TaskSupervisor
from millpond.spark.handlers.executor import STOP, TaskOrder, keep_worker
from tests.waiting import SOON


class Context:
    """The part of Spark's context that a driver reads before its first job."""

    master = "local[1]"

    def __init__(self, **settings: str) -> None:
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}

    def getConf(self) -> Context:
        return self

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._settings.get(name, default)


@asynccontextmanager
async def listening(**settings: str) -> AsyncIterator[TaskSupervisor]:
    context: Any = Context(**settings)
    supervisor = TaskSupervisor(context, "shop:pond", [], 1, grace=1.0, until_idle=False, port=0)
    async with supervisor._listening():
        yield supervisor


def order_of(supervisor: TaskSupervisor, certificate: str) -> TaskOrder:
    return TaskOrder(1, "127.0.0.1", supervisor._port, supervisor._token, (), (), 1.0, certificate)


async def run(order: TaskOrder) -> Any:
    return await asyncio.to_thread(lambda: next(keep_worker(order, [])))


async def first_bytes(supervisor: TaskSupervisor, sent: bytes) -> bytes:
    """The driver's answer to a connection without TLS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", supervisor._port)
    writer.write(sent)
    async with asyncio.timeout(SOON):
        try:
            return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


ENCRYPTED = ["spark_network_crypto_enabled", "spark_ssl_enabled", "spark_ssl_rpc_enabled"]


@pytest.mark.parametrize("setting", ENCRYPTED)
async def test_a_task_speaks_tls_if_spark_does(setting: str) -> None:
    async with listening(**{setting: "true"}) as supervisor:
        assert supervisor._certificate
        supervisor.stop()
        ended = await run(order_of(supervisor, supervisor._certificate))
        assert (ended.code, ended.last_output) == (0, ""), "it was told to stop"
        hello = b'{"token":"%s","slot":1,"host":"h"}\n' % supervisor._token.encode()
        assert await first_bytes(supervisor, hello) != STOP, "without TLS there is no answer"


async def test_a_task_trusts_the_certificate_of_its_driver_only() -> None:
    async with listening(spark_network_crypto_enabled="true") as supervisor:
        other = server_context()[1]
        ended = await run(order_of(supervisor, other))
    assert (
        ended.code == 1
        and "cannot reach the driver" in ended.last_output
        and "certificate" in ended.last_output.lower()
    )


async def test_without_encryption_of_spark_the_connection_is_plain() -> None:
    async with listening() as supervisor:
        assert supervisor._certificate == "" and supervisor._tls is None
        supervisor.stop()
        assert (await run(order_of(supervisor, ""))).code == 0


def test_every_run_has_a_certificate_of_its_own() -> None:
    context, certificate = server_context()
    assert certificate != server_context()[1]
    assert context.verify_mode is ssl.CERT_NONE, "tasks show the token"
