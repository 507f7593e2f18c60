"""The examples of clients run against a real server: Python, Node and curl; and a server is killed under streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from uuid import UUID, uuid4

import grpc
import httpx
import pytest

import millpond
from millpond import Message, State
from millpond.server.rpc import wire
from tests.server.rpc_client import received, rpc_client
from tests.shared import KINDS, empty_database
from tests.waiting import until

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "server"
PROTO = Path(wire.__file__).with_name("millpond.proto")


@contextmanager
def serving(url: str, ports: tuple[int, int] = (0, 0)) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A process `millpond serve`, its HTTP URL and its gRPC address."""
    http, rpc = map(str, ports)
    command = [sys.executable, "-m", "millpond", "serve", "--port", http, "--grpc-port", rpc, "--url", url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert all(line.startswith("serving") for line in lines), (lines, process.stderr.read())
        yield process, lines[0].split()[1].removesuffix("/api/v1"), lines[1].split("//")[1].strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    url = f"sqlite:///{tmp_path_factory.mktemp('clients') / 'pond.db'}"

    async def migrate() -> None:
        await (await millpond.connect(url, migrate=True)).close()

    asyncio.run(migrate())
    with serving(url) as (_, http, grpc_address):
        yield http, grpc_address


def publish(http: str, queue: str, number: int) -> None:
    bodies = {"messages": [{"body": {"sku": n}} for n in range(number)]}
    httpx.post(f"{http}/api/v1/queues/{queue}/messages/batch", json=bodies).raise_for_status()


def publish_bytes(http: str, queue: str) -> None:
    """A message that is no JSON, before the others."""
    message = {"base64": "//4A", "priority": 0}
    httpx.post(f"{http}/api/v1/queues/{queue}/messages", json=message).raise_for_status()


def counts(http: str, queue: str) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"{http}/api/v1/queues/{queue}").json()["counts"]
    return found


def run(command: list[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_with_curl(server: tuple[str, str], tmp_path: Path) -> None:
    http, _ = server
    publish(http, "curl", 12)
    publish_bytes(http, "curl")
    out = run([str(EXAMPLES / "worker.sh"), http, "curl", "13"], tmp_path)
    assert out.splitlines() == ["null", *(f'{{"sku": {n}}}' for n in range(12))], "bytes are in another field"
    assert counts(http, "curl")["COMPLETED"] == 13


def test_a_worker_in_python(server: tuple[str, str], tmp_path: Path) -> None:
    http, address = server
    publish(http, "python", 12)
    publish_bytes(http, "python")
    shutil.copy(PROTO, tmp_path)
    known = resources.files("grpc_tools") / "_proto"
    compiler = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"-I{known}"]
    run([*compiler, "--python_out=.", "--grpc_python_out=.", "millpond.proto"], tmp_path)
    out = run([sys.executable, str(EXAMPLES / "worker.py"), address, "python"], tmp_path, COUNT="13", PYTHONPATH=".")
    assert [line.split(" ", 1)[1] for line in out.splitlines()] == [str({"sku": n}) for n in range(12)]
    found = counts(http, "python")
    assert (found["COMPLETED"], found["FAILED"]) == (12, 1), "one bad body does not end the worker"


@pytest.mark.slow
def test_a_worker_in_node(server: tuple[str, str], tmp_path: Path) -> None:
    if shutil.which("npm") is None and "CI" not in os.environ:
        pytest.skip("Node is not installed")
    install = ["npm", "install", "--no-audit", "--no-fund", "@grpc/grpc-js@1", "@grpc/proto-loader@0.8"]
    subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    http, address = server
    publish(http, "node", 12)
    publish_bytes(http, "node")
    out = run(["node", str(EXAMPLES / "worker.mjs"), address, "node", str(PROTO)], tmp_path, COUNT="13")
    assert [line.split(" ", 1)[1] for line in out.splitlines()] == [f"{{ sku: {n} }}" for n in range(12)]
    found = counts(http, "node")
    assert (found["COMPLETED"], found["FAILED"]) == (12, 1), "one bad body does not end the worker"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request, request.param)


@pytest.mark.slow_on_servers
async def test_messages_of_a_killed_server_come_back_uncounted(url: str) -> None:
    store = await millpond.connect(url, migrate=True)
    ids = [p.id for p in await store.publish([Message(queue="q", payload=b"%d" % n) for n in range(5)])]
    with serving(url) as (process, _, address):
        async with rpc_client(address) as client:
            call = client.MessageStream(queues=["q"], lease=3600)
            acked, *held = await received(call, 5)
            await client.MessageAck(receipts=[acked.receipt])
            process.kill()
            process.wait()

    watching = await store.workers.join("watch")  # only a worker that beats notices the death of another one soon

    async def all_back() -> bool:
        await watching.beat()
        await store.workers.reap()
        return not await store.operations.browse("q", states=[State.PROCESSING])

    await until(all_back, every=0.2)
    await watching.leave()
    rows = {row.id: row for row in await store.operations.find(ids)}
    assert [rows[id_].state for id_ in ids] == [State.COMPLETED, *[State.PENDING] * 4]
    assert all(rows[id_].crashes == 0 for id_ in ids)
    with serving(url) as (process, _, address):
        async with rpc_client(address) as client:
            call = client.MessageStream(queues=["q"])
            again = await received(call, 4)
            assert {m.id for m in again} == {m.id for m in held}
            await client.MessageAck(receipts=[m.receipt for m in again])
            call.cancel()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == 5
    await store.close()


class Load:
    """Clients that go on while their server dies: they publish with ids of their own, and ack what they receive."""

    def __init__(self, api: str, address: str) -> None:
        self._api = api
        self._address = address
        self.published: set[str] = set()
        self.acked: Counter[str] = Counter()
        self.ended = asyncio.Event()

    async def publish(self) -> None:
        async with httpx.AsyncClient(base_url=self._api, timeout=10) as http:
            while not self.ended.is_set():
                messages = [{"body": n, "id": str(uuid4())} for n in range(20)]
                while True:
                    try:
                        reply = await http.post("/queues/q/messages/batch", json={"messages": messages})
                        if reply.status_code == 200:
                            break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
                self.published |= {str(message["id"]) for message in messages}

    async def consume(self) -> None:
        while not (self.ended.is_set() and set(self.acked) >= self.published):
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with rpc_client(self._address) as client:
                    call = client.MessageStream(queues=["q"], max_messages=50)
                    while not (self.ended.is_set() and set(self.acked) >= self.published):
                        messages = await received(call, 1)
                        refused = (await client.MessageAck(receipts=[m.receipt for m in messages])).refused
                        self.acked.update(m.id for m in messages if m.receipt not in refused)
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@pytest.mark.slow
async def test_clients_go_on_through_kills_of_their_server(url: str) -> None:
    store = await millpond.connect(url, migrate=True)
    ports = free_port(), free_port()
    load = Load(f"http://127.0.0.1:{ports[0]}/api/v1", f"127.0.0.1:{ports[1]}")
    publishers = [asyncio.create_task(load.publish()) for _ in range(2)]
    consumers = [asyncio.create_task(load.consume()) for _ in range(3)]
    for _ in range(2):
        before = len(load.acked)
        with serving(url, ports) as (process, _, _):
            await until(lambda seen=before: len(load.acked) > seen + 200)  # type: ignore[misc]
            process.kill()
    with serving(url, ports):
        before = len(load.acked)
        await until(lambda: len(load.acked) > before + 200)
        load.ended.set()
        await asyncio.gather(*publishers)  # the last batch of each may be written without its reply until then

        async def all_done() -> bool:
            (stats,) = await store.operations.count(["q"])
            return stats.counts[State.COMPLETED] >= len(load.published)

        await until(all_done, every=0.2)
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    (stats,) = await store.operations.count(["q"])
    assert stats.counts[State.COMPLETED] == len(load.published), "none is lost, none is doubled"
    assert not await store.operations.browse("q")
    rows = await store.operations.find([UUID(id_) for id_ in list(load.published)[:1000]])
    assert all(row.crashes == 0 for row in rows)
    await store.close()
