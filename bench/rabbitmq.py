"""Millpond on RabbitMQ compared with raw aio-pika and with Celery.

`python -m bench.rabbitmq` runs all of them in turns on one private broker. The bars are in `measure`.
Millpond and aio-pika publish persistent messages with confirms and mandatory to quorum queues, and ack each message.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
from rich.console import Console

from bench.__main__ import machine
from bench.measure import Measurement, ratio, take_turns
from bench.report import print_table, write_json, write_markdown
from bench.side import PAYLOAD, now
from millpond import Message, Millpond, connect
from millpond.transports.rabbitmq.names import work_arguments
from servers import RabbitMQ

PREFETCH = 100
AT_ONCE = 100
CELERY = "celery==5.*"
HERE = Path(__file__).parent


async def publish_ours(url: str, queue: str, count: int) -> float:
    transport = await connect(url)
    await transport.publish([Message(queue=queue, payload=PAYLOAD)])
    began = now()
    for _ in range(count // AT_ONCE):
        await transport.publish([Message(queue=queue, payload=PAYLOAD) for _ in range(AT_ONCE)])
    seconds = now() - began
    await transport.close()
    return seconds


def _arguments(queue: str) -> dict[str, Any]:
    """Those of Millpond's own queues."""
    return work_arguments(queue, "quorum", {}, broker_dead_letters=True)


async def publish_raw(url: str, queue: str, count: int) -> float:
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    await channel.declare_queue(queue, durable=True, arguments=_arguments(queue))

    def send() -> object:
        message = aio_pika.Message(
            PAYLOAD, message_id=str(uuid4()), delivery_mode=aio_pika.DeliveryMode.PERSISTENT, headers={"n": "1"}
        )
        return channel.default_exchange.publish(message, queue, mandatory=True)

    began = now()
    for _ in range(count // AT_ONCE):
        await asyncio.gather(*(send() for _ in range(AT_ONCE)))  # type: ignore[call-overload]
    seconds = now() - began
    await connection.close()
    return seconds


async def drain_ours(url: str, queue: str, count: int) -> float:
    """Drain a queue by a worker with a handler and retries."""
    pond, times, done = Millpond(url), [0.0, 0.0], asyncio.Event()
    seen = 0

    @pond.subscriber(queue, max_workers=PREFETCH)
    async def handle(body: bytes) -> None:
        nonlocal seen
        if seen == 0:
            times[0] = now()
        seen += 1
        if seen == count:
            times[1] = now()
            done.set()

    work = asyncio.create_task(pond.run())
    await done.wait()
    pond.stop()
    await work
    await pond.close()
    return times[1] - times[0]


async def drain_raw(url: str, queue: str, count: int) -> float:
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(PREFETCH)
    source = await channel.declare_queue(queue, durable=True, arguments=_arguments(queue))
    times, done, seen = [0.0, 0.0], asyncio.Event(), 0

    async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        nonlocal seen
        if seen == 0:
            times[0] = now()
        await message.ack()
        seen += 1
        if seen == count:
            times[1] = now()
            done.set()

    await source.consume(handle)
    await done.wait()
    await connection.close()
    return times[1] - times[0]


async def drain_celery(python: Path, url: str, count: int) -> float:
    process = await asyncio.create_subprocess_exec(
        str(python), str(HERE / "rabbitmq_celery.py"), str(count), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate(url.encode())
    (answer,) = [line for line in output.decode().splitlines() if line.startswith('{"seconds"')]  # after a banner
    return float(json.loads(answer)["seconds"])


async def fill(url: str, count: int) -> str:
    queue = f"bench-{uuid4().hex[:8]}"
    transport = await connect(url)
    for first in range(0, count, 1000):
        await transport.publish([Message(queue=queue, payload=PAYLOAD) for _ in range(min(1000, count - first))])
    await transport.close()
    return queue


async def measure(url: str, count: int, turns: int, celery: Path | None) -> list[Measurement]:
    async def ours() -> float:
        return await publish_ours(url, f"bench-{uuid4().hex[:8]}", count)

    async def raw() -> float:
        return await publish_raw(url, f"bench-{uuid4().hex[:8]}", count)

    async def drained() -> float:
        return await drain_ours(url, await fill(url, count), count)

    async def drained_raw() -> float:
        return await drain_raw(url, await fill(url, count), count)

    published = await take_turns({"ours": ours, "theirs": raw}, turns)
    works = {"ours": drained, "theirs": drained_raw}
    if celery is not None:
        works["celery"] = lambda: drain_celery(celery, url, count)
    drains = await take_turns(works, turns)
    found = [
        ratio(
            "rabbitmq-publish",
            "publish, confirmed",
            "aio-pika",
            published["ours"],
            published["theirs"],
            count,
            at_least=0.8,
        ),
        ratio("rabbitmq-drain", "handle and ack", "aio-pika", drains["ours"], drains["theirs"], count, at_least=0.7),
    ]
    if celery is not None:
        found.append(
            ratio("rabbitmq-celery", "handle and ack", "Celery 5", drains["ours"], drains["celery"], count, at_least=3)
        )
    return found


def celery_python(folder: Path) -> Path:
    """Python of a separate environment with Celery, because its dependencies differ."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", CELERY], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rabbitmq", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--no-celery", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("build/bench-rabbitmq.jsonl"), help="default: %(default)s")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also replace the table in this document")
    options = parser.parse_args()
    celery = None if options.no_celery else celery_python(Path("build/celery"))
    with RabbitMQ() as broker:
        found = asyncio.run(measure(broker.url, options.messages, options.turns, celery))
        server = broker.ask("GET", "/overview")["rabbitmq_version"]
    facts = {"aio-pika": version("aio-pika"), "RabbitMQ": server, "messages": options.messages, "rounds": options.turns}
    print_table(Console(), found)
    found = [m.with_facts({**machine(), **facts}) for m in found]
    write_json(options.json, found)
    if options.markdown:
        shown = ", ".join(f"{name} {value}" for name, value in {**machine(), **facts}.items() if name != "date")
        write_markdown(options.markdown, found, [shown], table="bench-rabbitmq")
    return int(any(m.met is False for m in found))


if __name__ == "__main__":
    sys.exit(main())
