"""`millpond serve` and `millpond tokens` as processes see them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import millpond
from millpond import Message
from millpond.errors import InvalidOption
from millpond.server.rpc import wire
from millpond.server.run_server import check
from millpond.server.settings import ServerSettings, is_loopback
from tests import templates
from tests.cli.conftest import Cli, cli  # noqa: F401
from tests.server.live import live_server


@contextmanager
def serving(url: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process `millpond serve` and its base URL."""
    command = [sys.executable, "-m", "millpond", "serve", "--port", "0", "--url", url, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving http"), (line, process.stderr.read() if process.stderr and not line else "")
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'pond.db'}"

    async def migrate() -> None:
        await (await millpond.connect(url, migrate=True)).close()

    asyncio.run(migrate())
    return url


def test_a_server_is_killed_and_restarted_and_nothing_is_lost(url: str) -> None:
    with serving(url) as (process, api):
        ids = [httpx.post(f"{api}/queues/q/messages", json={"body": n}).json()["id"] for n in range(5)]
        claims = httpx.post(f"{api}/claims", json={"queues": ["q"], "limit": 3, "lease": 60}).json()["claims"]
        process.kill()
        process.wait()
    with serving(url) as (process, api):
        receipts = [claim["receipt"] for claim in claims]
        assert httpx.post(f"{api}/claims/ack", json={"receipts": receipts}).json() == {"refused": []}
        rest = httpx.post(f"{api}/claims", json={"queues": ["q"], "limit": 9}).json()["claims"]
        assert {claim["id"] for claim in [*claims, *rest]} == set(ids)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_dashboard_is_named(url: str) -> None:
    with serving(url) as (process, _):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("the dashboard is at http://127.0.0.1:")
        assert "There is no queue yet" in httpx.get(line.split()[-1]).text


def test_a_server_of_some_shards(tmp_path: Path) -> None:
    urls = " ".join(templates.shards(tmp_path))
    with serving(urls, "--shards", "a") as (_, api):
        messages = [{"body": n} for n in range(60)]
        published = httpx.post(f"{api}/queues/q/messages/batch", json={"messages": messages}).json()["published"]
        shards = {shard["name"]: shard["live"] for shard in httpx.get(f"{api}/shards").json()["shards"]}
        assert len(published) == sum(shards.values()) == 60 and min(shards.values()) > 0
        number = 0
        while claims := httpx.post(f"{api}/claims", json={"queues": ["q"], "limit": 100}, timeout=60).json()["claims"]:
            number += len(claims)
        assert number == shards["a"]
    with pytest.raises(AssertionError, match="several URLs"), serving(f"sqlite:///{tmp_path}/x.db", "--shards", "a"):
        pass


def test_a_stop_ends_waiting_claims(url: str) -> None:
    with serving(url) as (process, api), httpx.Client(timeout=60) as client:
        host, port = api.split("/")[2].split(":")
        body = b'{"queues": ["q"], "wait": 60}'
        with socket.create_connection((host, int(port))) as waiting:
            head = f"POST /api/v1/claims HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            waiting.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while 'route="/api/v1/claims"' not in (text := client.get(f"http://{host}:{port}/metrics").text):
                assert "millpond" in text
                if client.get(f"{api}/queues").status_code == 200:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_tokens_are_listed_added_and_removed(cli: Cli, url: str) -> None:  # noqa: F811
    assert cli.ok("tokens", "--url", url).out == "no tokens\n"
    token = cli.ok("tokens", "add", "shop", "--role", "publish", "--queue", "orders.*", "--url", url, "--json").json
    text = token["token"]
    listed = cli.ok("tokens", "--url", url)
    assert "shop" in listed.out and "orders.*" in listed.out and text.split("_")[2] not in listed.out
    assert Path(url.removeprefix("sqlite:///")).read_bytes().find(text.split("_", 2)[2].encode()) == -1
    assert "--role" in cli.fails(2, "tokens", "add", "x", "--url", url)
    assert "roles are" in cli.fails(2, "tokens", "add", "x", "--role", "root", "--url", url)
    assert "name" in cli.fails(2, "tokens", "add", "--url", url)
    with live_server(url) as running:
        path = f"{running.url}/api/v1/queues"
        assert httpx.post(f"{path}/orders.eu/messages", json={"body": 1}).status_code == 401
        headers = {"authorization": f"Bearer {text}"}
        assert httpx.post(f"{path}/orders.eu/messages", json={"body": 1}, headers=headers).status_code == 200
        assert httpx.get(path, headers=headers).status_code == 403
    assert cli.ok("tokens", "remove", "shop", "--url", url).out == "removed shop\n"
    assert "no token" in cli.fails(1, "tokens", "remove", "shop", "--url", url)
    with live_server(url) as running:
        assert httpx.get(f"{running.url}/api/v1/queues").status_code == 401
    cli.ok("tokens", "reset", "--url", url)
    with live_server(url) as running:
        assert httpx.get(f"{running.url}/api/v1/queues").status_code == 200


def test_behind_a_proxy_with_a_prefix(url: str) -> None:
    with live_server(url, root_path="/queue", proxies="127.0.0.1") as running:
        told = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9", "host": "shop.example"}
        reply = httpx.get(f"{running.url}/dashboard", headers=told)
        assert reply.status_code == 401 and 'action="/queue/dashboard/login"' in reply.text
        cookie = reply.headers["set-cookie"]
        assert "Secure" in cookie and "Path=/queue/dashboard" in cookie
        assert "Secure" not in httpx.get(f"{running.url}/dashboard").headers["set-cookie"]
        for _ in range(20):  # wrong tokens are counted by the address behind the proxy
            httpx.get(f"{running.url}/api/v1/queues", headers={**told, "authorization": "Bearer x"})
        other = {**told, "x-forwarded-for": "203.0.113.10", "authorization": "Bearer x"}
        assert httpx.get(f"{running.url}/api/v1/queues", headers=other).status_code == 401


@pytest.mark.parametrize("path", ["queue", "//queue", "/é"])
def test_a_wrong_prefix_is_explained(cli: Cli, url: str, path: str) -> None:  # noqa: F811
    assert "--root-path" in cli.fails(2, "serve", "--root-path", path, "--url", url)


def test_beyond_loopback_a_server_needs_tokens(cli: Cli, url: str) -> None:  # noqa: F811
    assert "tokens add" in cli.fails(2, "serve", "--host", "0.0.0.0", "--url", url)  # noqa: S104
    assert "belong together" in cli.fails(2, "serve", "--tls-cert", "x", "--url", url)
    assert "--mask" in cli.fails(2, "serve", "--mask", "everyone:*", "--url", url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot be bound" in cli.fails(2, "serve", "--port", port, "--url", url)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5  # noqa: S104


async def test_a_broker_without_tokens_stays_on_loopback() -> None:
    class Broker:
        capabilities = millpond.Capability(0)

    broker: Any = Broker()
    await check(broker, ServerSettings())
    with pytest.raises(InvalidOption, match="no token"):
        await check(broker, ServerSettings(host="10.0.0.1"))


def test_tls(url: str, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-keyout", key, "-out", cert, "-days", "2", *subject], check=True, capture_output=True)
    with live_server(url, tls_cert=str(cert), tls_key=str(key), grpc_port=0) as running:
        assert running.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{running.url}/live", verify=trusting).json() == {"ok": True}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/live")
        assert running.grpc_address is not None
        request, reply, _ = wire.methods()["Publish"]
        new = request(queue="q", messages=[wire.message("NewMessage")(body=b"1")])

        def publish(channel: grpc.Channel) -> Any:
            call = channel.unary_unary(
                f"/{wire.SERVICE}/Publish",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            return call(new, timeout=60)

        with grpc.secure_channel(running.grpc_address, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            assert publish(channel).published[0].new
        with grpc.insecure_channel(running.grpc_address) as channel, pytest.raises(grpc.RpcError) as caught:
            publish(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_leaves_does_not_keep_messages(url: str) -> None:
    body = b'{"queues": ["q"], "wait": 60, "lease": 600}'
    head = "POST /api/v1/claims HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}"
    with live_server(url) as running:
        address = ("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
        with socket.create_connection(address) as waiting:
            waiting.sendall(head.encode() + b"\r\n\r\n" + body)
            while not running.state.waiting.taken:
                os.sched_yield()
        while running.state.waiting.taken:
            os.sched_yield()

        async def publish_and_claim() -> int:
            store = await millpond.connect(url)
            await store.publish([Message(queue="q", payload=b"1")])
            claims = await store.claim(["q"])
            await store.close()
            return len(claims)

        assert asyncio.run(publish_and_claim()) == 1
