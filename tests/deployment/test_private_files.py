"""Files of SQLite are private, or follow the mode that their owner gave the database."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import millpond
from millpond import Message
from millpond.errors import StoreError


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {file.name: oct(stat.S_IMODE(file.stat().st_mode)) for file in folder.iterdir()}


async def modes_while_a_worker_runs(folder: Path) -> dict[str, str]:
    store = await millpond.connect(f"sqlite:///{folder}/orders.db")
    await store.publish([Message(queue="q", payload=b"card")])
    presence = await store.workers.join("w")
    found = modes(folder)
    await presence.leave()
    await store.close()
    return found


async def test_a_new_database_is_private(tmp_path: Path) -> None:
    found = await modes_while_a_worker_runs(tmp_path)
    assert {"orders.db", "orders.db-wal", "orders.db-shm"} < set(found) and len(found) == 4
    assert set(found.values()) == {"0o600"}


async def test_files_beside_a_shared_database_are_for_its_writers(tmp_path: Path) -> None:
    await (await millpond.connect(f"sqlite:///{tmp_path}/orders.db")).close()
    (tmp_path / "orders.db").chmod(0o660)
    found = await modes_while_a_worker_runs(tmp_path)
    assert set(found.values()) == {"0o660"}


async def test_a_reader_of_the_database_cannot_lock_the_file_of_a_worker(tmp_path: Path) -> None:
    await (await millpond.connect(f"sqlite:///{tmp_path}/orders.db")).close()
    (tmp_path / "orders.db").chmod(0o644)
    found = await modes_while_a_worker_runs(tmp_path)
    assert [mode for name, mode in found.items() if "-worker-" in name] == ["0o600"]
    assert found["orders.db"] == "0o644"


async def test_a_lock_file_that_cannot_be_made_again_is_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted, and its place is taken. Closed a second time, its number may be that of another open file."""
    store: Any = await millpond.connect(f"sqlite:///{tmp_path}/orders.db")
    presence = await store.workers.join("w")
    (file,) = tmp_path.glob("*-worker-*")
    number = presence._session._file
    closed: list[int] = []
    close = os.close
    file.unlink()
    file.mkdir()
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="Is a directory"):
        patched.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
        await presence.beat()
    assert closed.count(number) == 1
    file.rmdir()
    assert await presence.beat()
    await store.close()
