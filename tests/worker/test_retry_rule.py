"""A retry rule of the user's own: a subclass of `Retry`."""

from datetime import timedelta
from typing import Any

import pytest

from millpond import Millpond, Retry, State


class Busy(Exception):
    pass


class AsTheServerSays(Retry, frozen=True):
    """A rule of a user: one kind of error waits for a minute, without limit."""

    def decide(self, attempts: int, error: BaseException | None = None, elapsed: float = 0.0, *more: Any) -> Any:
        if isinstance(error, Busy):
            return error.args[0]
        return super().decide(attempts, error, elapsed, *more)


@pytest.mark.parametrize("wait", [60, 60.0, timedelta(minutes=1)])
async def test_a_rule_of_the_user_decides(wait: Any) -> None:
    pond = Millpond("memory://")
    tries: list[int] = []

    @pond.subscriber("q", retry=AsTheServerSays(attempts=2, initial=1, jitter=0))
    async def handle(body: int) -> None:
        tries.append(body)
        raise Busy(wait) if len(tries) < 4 else OSError("down")

    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        for _ in range(3):
            assert await test.run() == 1
            assert await test.run() == 0
            test.advance(60)
        await test.run()
        (row,) = await test.messages("q")
        assert (row.state, row.reason, row.attempts) == (State.FAILED, "retries used up", 4)


@pytest.mark.parametrize("wrong", [-1, "soon", float("nan"), object()])
async def test_a_rule_that_returns_nonsense_harms_no_message(wrong: Any, caplog: pytest.LogCaptureFixture) -> None:
    pond = Millpond("memory://")

    @pond.subscriber("q", retry=AsTheServerSays())
    async def handle(body: int) -> None:
        raise Busy(wrong)

    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        await test.run()
        (row,) = await test.messages("q")
    assert row.state is State.RETRYABLE and "the retry policy cannot decide" in caplog.text
