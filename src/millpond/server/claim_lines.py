"""Claims that wait: one line for each queue, served in turn, by one claim at a time, whose messages they share.

Otherwise each message would wake all waiting callers, who would all claim, and some of them would never be the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from millpond.errors import StoreError
from millpond.message import Claim
from millpond.outcome import GiveBack
from millpond.seam.transport import Transport

log = logging.getLogger("millpond.server")

_WAIT = 1.0
"""Seconds after which the first in a line claims again, although no message was announced."""
_CLOSE_WITHIN = 5.0
"""Seconds for claims to end when the server stops."""
ClaimFrom = Callable[[Sequence[str]], Awaitable[list[Claim]]]


class WaitingCaller:
    """One caller, in the lines of all its queues."""

    def __init__(self, queues: Sequence[str], claim: ClaimFrom, *, limit: int, lease: float) -> None:
        self.queues = tuple(dict.fromkeys(queues))
        self.claim = claim
        self.limit = limit
        self.lease = lease
        self.claims: asyncio.Future[list[Claim]] = asyncio.get_running_loop().create_future()
        self.is_served = False
        """Whether a line claims for it now."""


class _Line:
    """The callers that wait for one queue, and the task that claims for the first of them."""

    def __init__(self, lines: ClaimLines, queue: str) -> None:
        self._lines = lines
        self._queue = queue
        self._claims = False
        self.callers: deque[WaitingCaller] = deque()
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"waiting claims of {queue}")

    def end(self) -> None:
        """Stop. A claim that is under way ends first, and gives its messages back."""
        if not self._claims:
            self.task.cancel()

    async def _run(self) -> None:
        while self.callers:
            self.changed.clear()
            caller = next((one for one in self.callers if not one.is_served), None)
            if caller is None:
                await self.changed.wait()
            elif not await self._serve(caller) and self.callers:
                await self._wait()

    async def _serve(self, caller: WaitingCaller) -> bool:
        """Claim for a caller and those behind it; whether there was anything."""
        self._claims = caller.is_served = True
        try:
            claims = await caller.claim([self._queue])
            if claims and caller.claims.done():  # the caller left
                await self._lines.transport.settle([GiveBack(claim.receipt) for claim in claims])
        except Exception as e:
            self._lines.leave(caller)
            if caller.claims.done():
                log.warning("messages of a caller that left come back when their lease ends: %s", type(e).__name__)
            else:
                caller.claims.set_exception(e)
            return True
        finally:
            self._claims = caller.is_served = False
            self._lines.changed(caller)
        if not caller.claims.done():
            for taker, share in self._shares(caller, claims):
                self._lines.leave(taker)
                taker.claims.set_result(share)
        return bool(claims)

    def _shares(self, caller: WaitingCaller, claims: Sequence[Claim]) -> list[tuple[WaitingCaller, list[Claim]]]:
        """Deal the messages in turn: who waits gets one before another gets two. The lease must be the same."""
        takers = [caller, *(one for one in self.callers if one is not caller and self._may_take(one, caller))]
        shares: list[tuple[WaitingCaller, list[Claim]]] = [(taker, []) for taker in takers[: len(claims)]]
        turn = 0
        for claim in claims:  # the caller alone has room for all of them
            while len(shares[turn][1]) >= shares[turn][0].limit:
                turn = (turn + 1) % len(shares)
            shares[turn][1].append(claim)
            turn = (turn + 1) % len(shares)
        return shares

    @staticmethod
    def _may_take(one: WaitingCaller, caller: WaitingCaller) -> bool:
        return not one.is_served and not one.claims.done() and one.lease == caller.lease

    async def _wait(self) -> None:
        try:
            await self._lines.transport.wait([self._queue], _WAIT)
        except StoreError:  # the next claim tells it to its caller
            await asyncio.sleep(_WAIT)


class ClaimLines:
    """The lines of all queues of a server."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those of all lines, also of ended ones whose last claim is under way."""

    def any_waits(self, queues: Sequence[str]) -> bool:
        """Whether a caller waits for one of these queues: a new one waits behind it."""
        return any(queue in self._lines for queue in queues)

    def join(self, caller: WaitingCaller) -> None:
        """Stand behind all others. The caller awaits `claims`, and must leave."""
        for queue in caller.queues:
            line = self._lines.get(queue)
            if line is None:
                line = self._lines[queue] = _Line(self, queue)
                self._tasks.add(line.task)
                line.task.add_done_callback(self._tasks.discard)
            line.callers.append(caller)
            line.changed.set()

    def leave(self, caller: WaitingCaller) -> None:
        """Leave all lines. A claim that is under way for the caller ends in `claims`, or is given back."""
        for queue in caller.queues:
            line = self._lines.get(queue)
            if line is not None and caller in line.callers:
                line.callers.remove(caller)
                if not line.callers:
                    del self._lines[queue]
                    line.end()

    def changed(self, caller: WaitingCaller) -> None:
        """Another line may claim for the caller now."""
        for queue in caller.queues:
            if (line := self._lines.get(queue)) is not None:
                line.changed.set()

    async def close(self) -> None:
        """End all lines. Claims that are under way end first, and give their messages back."""
        for line in self._lines.values():
            line.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_WITHIN)
        late = list(self._tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
