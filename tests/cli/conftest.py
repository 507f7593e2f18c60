"""Fixtures: a command line in this process, and a migrated database of each kind for it."""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import pytest

from millpond import Claim, Message, connect
from millpond.cli import run_command
from millpond.seam.transport import Transport
from tests.shared import KINDS, empty_database

COMMAND_VARIABLES = [
    *("MILLPOND_URL", "MILLPOND_SCHEMA", "MILLPOND_TABLE_PREFIX", "MILLPOND_OPTIONS"),
    *("MILLPOND_FROM_URL", "MILLPOND_FROM_OPTIONS", "MILLPOND_TO_URL", "MILLPOND_TO_OPTIONS"),
]


class Output(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Runs `millpond …` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: str, stdin: bytes = b"") -> Output:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capsys.readouterr()
        code = run_command(args)
        return Output(code, *self._capsys.readouterr())

    def ok(self, *args: str, stdin: bytes = b"") -> Output:
        output = self(*args, stdin=stdin)
        assert (output.code, output.err) == (0, ""), output
        return output

    def fails(self, code: int, *args: str, stdin: bytes = b"") -> str:
        """Run a command that must fail with this exit code; returns its one line on stderr."""
        output = self(*args, stdin=stdin)
        assert output.code == code, output
        assert output.out == "", output
        assert output.err.startswith("millpond: ") and output.err.count("\n") == 1, output
        return output.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in COMMAND_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return Cli(capsys, monkeypatch)


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a migrated database, also in MILLPOND_URL."""
    url = empty_database(request, request.param)
    if request.param == "sqlite":
        cli.ok("migrate", url)
    monkeypatch.setenv("MILLPOND_URL", url)
    return url


def with_store(url: str, work: Callable[[Transport], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run_it() -> Any:
        store = await connect(url, **options)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run_it())


def published(url: str, messages: Sequence[Message]) -> list[str]:
    async def work(store: Transport) -> list[str]:
        return [str(p.id) for p in await store.publish(messages)]

    ids: list[str] = with_store(url, work)
    return ids


def settled(url: str, queue: str, outcome: Callable[[Claim], Any], limit: int = 1000) -> list[str]:
    """Claim from a queue and settle by `outcome`; returns the ids."""

    async def work(store: Transport) -> list[str]:
        claims = await store.claim([queue], limit=limit)
        assert await store.settle([outcome(claim) for claim in claims]) == []
        return [str(claim.receipt.id) for claim in claims]

    ids: list[str] = with_store(url, work)
    return ids
