"""A command line in this process, and a migrated database of each kind behind it."""

import asyncio
import io
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import pytest

from millpond import Claim, Message, connect
from millpond.cli import run
from millpond.transport import Store
from tests.shared import KINDS, empty_database


class Said(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """`millpond …` with MILLPOND_URL set, if there is one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: str, stdin: bytes = b"") -> Said:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capsys.readouterr()
        code = run(args)
        return Said(code, *self._capsys.readouterr())

    def ok(self, *args: str, stdin: bytes = b"") -> Said:
        said = self(*args, stdin=stdin)
        assert (said.code, said.err) == (0, ""), said
        return said

    def fails(self, code: int, *args: str, stdin: bytes = b"") -> str:
        """The one line on stderr."""
        said = self(*args, stdin=stdin)
        assert said.code == code, said
        assert said.out == "", said
        assert said.err.startswith("millpond: ") and said.err.count("\n") == 1, said
        return said.err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in ("MILLPOND_URL", "MILLPOND_SCHEMA", "MILLPOND_TABLE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return Cli(capsys, monkeypatch)


@pytest.fixture(params=KINDS)
def empty_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    """A migrated database, which MILLPOND_URL names."""
    url = empty_database(request, request.param)
    if request.param == "sqlite":
        cli.ok("migrate", url)
    monkeypatch.setenv("MILLPOND_URL", url)
    return url


def with_store(url: str, work: Callable[[Store], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def run_it() -> Any:
        store = await connect(url, **options)
        try:
            assert isinstance(store, Store)
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run_it())


def published(url: str, messages: Sequence[Message]) -> list[str]:
    async def work(store: Store) -> list[str]:
        return [str(p.id) for p in await store.publish(messages)]

    ids: list[str] = with_store(url, work)
    return ids


def settled(url: str, queue: str, outcome: Callable[[Claim], Any], limit: int = 1000) -> list[str]:
    """Claim from a queue and settle by `outcome`; returns the ids."""

    async def work(store: Store) -> list[str]:
        claims = await store.claim([queue], limit=limit)
        assert await store.settle([outcome(claim) for claim in claims]) == []
        return [str(claim.receipt.id) for claim in claims]

    ids: list[str] = with_store(url, work)
    return ids
