"""Child processes that do not start, and messages that are cut off."""

import asyncio
import io
import socket
import sys
import threading

import pytest

from millpond.message import Claim, Message, Receipt, new_id
from millpond.outcome import GiveBack
from millpond.worker import child_messages
from millpond.worker.child_worker import Child
from millpond.worker.children import Children, NotStarted


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (["/no/such/command"], "No such file or directory"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit code 3"),
        ([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"], "killed by SIGABRT"),
    ],
)
async def test_a_child_that_does_not_start(command: list[str], how: str, caplog: pytest.LogCaptureFixture) -> None:
    children = Children(command, lambda event: None)
    with pytest.raises(NotStarted):
        await children.take(unused=True)
    assert how in caplog.text and "the next one starts in 1 s" in caplog.text
    assert not children.may_start
    await children.end()


async def test_a_message_that_is_cut_off_is_no_message() -> None:
    message = child_messages.Settle(GiveBack(Receipt(new_id(), 7), crashed=True, delay=4), False)
    packed = child_messages.pack(message)
    for end in range(len(packed) + 1):
        reader = asyncio.StreamReader()
        reader.feed_data(packed[:end])
        reader.feed_eof()
        expected = message if end == len(packed) else None
        assert await child_messages.receive(reader) == expected
        assert child_messages.read(io.BytesIO(packed[:end])) == expected  # type: ignore[comparison-overlap]


async def test_a_slot_that_is_idle_does_not_end_the_message_that_just_came() -> None:
    """Its reader has it, and the event loop not yet: only its own handler ends it."""
    worker, its = socket.socketpair()
    with worker, its:
        child = Child(its, [], str)
        receipt = Receipt(new_id(), 7)
        message = Message(queue="q", payload=b"", id=receipt.id)
        worker.sendall(child_messages.pack(child_messages.Run(Claim(message, receipt, 3, 0, 1, 2, 3, 4))))
        reader = threading.Thread(target=child._read)
        reader.start()
        with worker.makefile("rb") as file:
            assert child_messages.read(file) == child_messages.Started()  # type: ignore[comparison-overlap]
            child.flush_if_idle()
            worker.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                worker.recv(1)
            worker.settimeout(None)
            # No subscriber has this queue: it ends as soon as the loop has it.
            assert await asyncio.to_thread(child_messages.read, file) == child_messages.Idle()
        worker.shutdown(socket.SHUT_WR)
        await child._over
        reader.join()
