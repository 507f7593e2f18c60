"""Every transport against the model: random lives of messages, the same results at every step.

Both sides share one clock, and the test makes the ids. Claims must agree in content and order, refusals receipt by
receipt, and at the end every row in every field.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid5

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond import (
    Ack,
    Capability,
    Claim,
    GiveBack,
    ManualClock,
    Message,
    MillpondError,
    Nack,
    Outcome,
    Receipt,
    Reject,
    Row,
    State,
    Transport,
)
from millpond.clock import as_datetime
from millpond.message import draft
from tests.conformance.backends import Backend
from tests.conformance.model import Model

T = TypeVar("T")

QUEUES = ("a", "b")
NEEDED = (
    Capability.CLAIM_BY_ID
    | Capability.PRIORITY
    | Capability.DEDUPE
    | Capability.EXTEND
    | Capability.BROWSE
    | Capability.RESCHEDULE
    | Capability.ARCHIVE
    | Capability.PAUSE
)
DEDUPE_FOR = 60
NAMESPACE = UUID(int=7)
outcomes: dict[str, Callable[[Receipt, float], Outcome]] = {
    "ack": lambda receipt, _: Ack(receipt),
    "ack and drop": lambda receipt, _: Ack(receipt, keep=False),
    "nack": lambda receipt, delay: Nack(receipt, delay=delay),
    "nack with error": lambda receipt, delay: Nack(receipt, delay=delay, error=f"waits {delay}"),
    "reject": lambda receipt, _: Reject(receipt, reason="no"),
    "reject and drop": lambda receipt, _: Reject(receipt, keep=False),
    "give back": lambda receipt, _: GiveBack(receipt),
    "interrupted": lambda receipt, _: GiveBack(receipt, delivered=True),
    "crashed": lambda receipt, _: GiveBack(receipt, crashed=True),
    "crashed and delayed": lambda receipt, delay: GiveBack(receipt, crashed=True, delay=delay),
}
KINDS = sorted(outcomes)

queues = st.lists(st.sampled_from(QUEUES), min_size=1, max_size=2, unique=True)
seconds = st.sampled_from([0, 0.000001, 1, 5, 30])
picks = st.lists(st.integers(0, 15), max_size=4)
some_picks = st.lists(st.integers(0, 15), min_size=1, max_size=4)
"""Indexes of ids or receipts, counted from the last one, because the last few change most."""
kinds = st.lists(st.sampled_from(KINDS), min_size=4, max_size=4)


class Lives(RuleBasedStateMachine):
    """One example: the model, the transport under test, and the ids and receipts so far."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.backend.empty()
        self.real: Transport = self.run(self.backend.connect(clock=self.clock, dedupe_for=DEDUPE_FOR))
        self.model = Model(self.clock, DEDUPE_FOR)
        self.ids: list[UUID] = []
        self.claimed: list[tuple[Receipt, Receipt]] = []
        """(receipt of the model, receipt of the transport) of every claim so far, stale ones included."""

    def run(self, call: Awaitable[T]) -> T:
        return self.loop.run_until_complete(call)

    def both(self, verb: Callable[[Transport], Coroutine[Any, Any, T]]) -> T | type[MillpondError]:
        """Make the same call on both sides; results and types of error must agree."""
        answers: list[Any] = []
        for side in (self.model, self.real):
            try:
                answers.append(self.run(verb(side)))  # type: ignore[arg-type]
            except MillpondError as e:
                answers.append(type(e))
        assert answers[1] == answers[0]
        return answers[1]  # type: ignore[no-any-return]

    def pick(self, numbers: list[int]) -> list[UUID]:
        return [self.ids[-1 - n % len(self.ids)] for n in numbers]

    # --- publishing ---------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for queue in QUEUES:
            self.publish(queue, 50, None, None, 4)

    @rule(
        queue=st.sampled_from(QUEUES),
        priority=st.sampled_from([0, 50, 50, 100]),
        delay=st.none() | seconds,
        expires=st.none() | st.sampled_from([1, 40]),
        count=st.integers(1, 4),
    )
    def publish(self, queue: str, priority: int, delay: float | None, expires: float | None, count: int) -> None:
        new = [uuid5(NAMESPACE, f"{len(self.ids) + n}") for n in range(count)]
        self.ids += new
        self.both(
            lambda side: side.publish(
                [
                    Message(queue=queue, payload=id_.bytes, id=id_, priority=priority, delay=delay, expires=expires)
                    for id_ in new
                ]
            )
        )

    @rule(queue=st.sampled_from(QUEUES), again=some_picks, moment=st.integers(-3, 3), key=st.none() | st.just("k"))
    def publish_again(self, queue: str, again: list[int], moment: int, key: str | None) -> None:
        due = as_datetime(self.clock.now() + moment * 1_000_000)
        messages = [Message(queue=queue, payload=b"", id=id_, due_at=due, key=key) for id_ in self.pick(again)]
        self.both(lambda side: side.publish(messages))

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 6), priority=st.sampled_from([0, 50]))
    def publish_without_ids(self, queue: str, count: int, priority: int) -> None:
        """Ids made by the publisher: they are later than all others only if time has passed, as in real use."""
        self.clock.advance(0.000001)
        messages = [Message(queue=queue, payload=str(n).encode(), priority=priority) for n in range(count)]
        published = self.run(self.real.publish(messages))
        assert all(p.new for p in published)
        drafts = [msgspec.structs.replace(draft(m), id=p.id) for m, p in zip(messages, published, strict=True)]
        self.model.publish_drafts(drafts)
        self.ids += [p.id for p in published]

    # --- claiming -----------------------------------------------------------------------------------------

    def compare_claims(self, claim: Callable[[Transport], Coroutine[Any, Any, list[Claim]]]) -> None:
        expected, got = self.run(claim(self.model)), self.run(claim(self.real))  # type: ignore[arg-type]
        assert [plain(c) for c in got] == [plain(c) for c in expected]
        self.claimed += [(e.receipt, g.receipt) for e, g in zip(expected, got, strict=True)]

    @rule(
        queues=queues,
        limit=st.integers(1, 6) | st.just(50),
        lease=st.sampled_from([0.000001, 1, 10]),
        max_deliveries=st.sampled_from([None, None, 2]),
        kinds=st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
    )
    def claim(
        self,
        queues: list[str],
        limit: int,
        lease: float,
        max_deliveries: int | None,
        kinds: tuple[bool, bool],
    ) -> None:
        suspects, others = kinds
        self.compare_claims(
            lambda side: side.claim(
                queues, limit, lease, max_deliveries=max_deliveries, suspects=suspects, others=others
            )
        )

    @rule(queues=queues, limit=st.integers(1, 3), chosen=some_picks)
    def claim_by_id(self, queues: list[str], limit: int, chosen: list[int]) -> None:
        ids = self.pick(chosen)
        self.compare_claims(lambda side: side.claim(queues, limit, 10, ids=ids))

    # --- settling -----------------------------------------------------------------------------------------

    def receipts(self, numbers: list[int]) -> list[tuple[Receipt, Receipt]]:
        return [self.claimed[-1 - n % len(self.claimed)] for n in numbers]

    def compare_refusals(
        self, pairs: list[tuple[Receipt, Receipt]], call: Callable[[Transport, list[Receipt]], Awaitable[list[Receipt]]]
    ) -> None:
        expected = self.run(call(self.model, [ours for ours, _ in pairs]))  # type: ignore[arg-type]
        refused = self.run(call(self.real, [theirs for _, theirs in pairs]))
        assert len(refused) == len(expected)
        assert {theirs for ours, theirs in pairs if ours in expected} == set(refused)

    @precondition(lambda self: self.claimed)
    @rule(which=some_picks, kinds=kinds, delay=seconds)
    def settle(self, which: list[int], kinds: list[str], delay: float) -> None:
        self.compare_refusals(
            self.receipts(which),
            lambda side, receipts: side.settle(
                [outcomes[kind](r, delay) for kind, r in zip(kinds, receipts, strict=False)]
            ),
        )

    @precondition(lambda self: self.claimed)
    @rule(which=some_picks, kind=st.sampled_from(KINDS), delay=seconds)
    def settle_twice(self, which: list[int], kind: str, delay: float) -> None:
        for _ in range(2):
            self.compare_refusals(
                self.receipts(which),
                lambda side, receipts: side.settle([outcomes[kind](r, delay) for r in receipts]),
            )

    @rule(queues=queues, limit=st.integers(1, 6), kinds=kinds, delay=seconds)
    def work(self, queues: list[str], limit: int, kinds: list[str], delay: float) -> None:
        """The usual work: claim messages and settle them."""
        before = len(self.claimed)
        self.compare_claims(lambda side: side.claim(queues, limit, 10))
        fresh = self.claimed[before:]
        self.compare_refusals(
            fresh,
            lambda side, receipts: side.settle([outcomes[kinds[n % 4]](r, delay) for n, r in enumerate(receipts)]),
        )

    @precondition(lambda self: self.claimed)
    @rule(which=some_picks, lease=st.sampled_from([0, 1, 10, 100]))
    def extend(self, which: list[int], lease: float) -> None:
        self.compare_refusals(self.receipts(which), lambda side, receipts: side.extend(receipts, lease))

    # --- time ---------------------------------------------------------------------------------------------

    @rule(step=st.sampled_from([0.000001, 1, 1, 5, 10, 70]))
    def time_passes(self, step: float) -> None:
        self.clock.advance(step)

    @rule()
    def reap(self) -> None:
        self.both(lambda side: side.workers.reap())

    @rule(queues=queues, limit=st.integers(1, 3), times=st.integers(1, 2), kind=st.none() | st.sampled_from(KINDS))
    def workers_die(self, queues: list[str], limit: int, times: int, kind: str | None) -> None:
        """Claim, and return too late or never: this makes zombies."""
        before = len(self.claimed)
        for _ in range(times):
            self.compare_claims(lambda side: side.claim(queues, limit, 1))
            self.clock.advance(1)
        self.both(lambda side: side.workers.reap())
        if kind is not None:
            self.compare_refusals(
                self.claimed[before:], lambda side, receipts: side.settle([outcomes[kind](r, 0) for r in receipts])
            )

    # --- operators ----------------------------------------------------------------------------------------

    @rule(queue=st.sampled_from(QUEUES), paused=st.booleans())
    def pause_or_resume(self, queue: str, paused: bool) -> None:
        self.both(lambda side: side.operations.pause(queue) if paused else side.operations.resume(queue))

    @rule(
        chosen=some_picks,
        priority=st.none() | st.sampled_from([0, 50, 100]),
        delay=st.none() | seconds,
        attempts=st.none() | st.sampled_from([0, 2]),
    )
    def reschedule(self, chosen: list[int], priority: int | None, delay: float | None, attempts: int | None) -> None:
        ids = self.pick(chosen)
        self.both(lambda side: side.operations.reschedule(ids, priority=priority, delay=delay, attempts=attempts))

    @rule(chosen=some_picks)
    def cancel(self, chosen: list[int]) -> None:
        ids = self.pick(chosen)
        self.both(lambda side: side.operations.cancel(ids))

    @rule(chosen=some_picks, name=st.sampled_from(["monday", "tuesday"]), queue=st.none() | st.sampled_from(QUEUES))
    def replay(self, chosen: list[int], name: str, queue: str | None) -> None:
        ids = self.pick(chosen)
        published = self.both(lambda side: side.operations.replay(ids, name=name, queue=queue))
        if isinstance(published, list):
            self.ids += [p.id for p in published if p.new]

    @rule(queue=st.sampled_from(QUEUES), completed=st.none() | seconds, failed=st.none() | seconds)
    def retain(self, queue: str, completed: float | None, failed: float | None) -> None:
        self.both(lambda side: side.operations.retain(queue, completed=completed, failed=failed))

    @rule(
        queue=st.none() | st.sampled_from(QUEUES),
        older_than=st.none() | seconds,
        states=st.sampled_from([None, [State.COMPLETED], [State.FAILED]]),
    )
    def purge(self, queue: str | None, older_than: float | None, states: list[State] | None) -> None:
        self.both(lambda side: side.operations.purge(queue, older_than=older_than, states=states))

    # --- invariants ---------------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        self.both(lambda side: side.operations.count())

    @rule(queue=st.none() | st.sampled_from(QUEUES), chosen=picks, limit=st.integers(1, 4))
    def look(self, queue: str | None, chosen: list[int], limit: int) -> None:
        self.both(partial(_find, ids=self.pick(chosen)))
        for page in ("browse", "archived"):
            rows = self.both(partial(_page, page, queue=queue, limit=limit))
            if rows:
                after = rows[-1].position
                self.both(partial(_page, page, queue=queue, limit=limit, after=after))

    def teardown(self) -> None:
        try:
            self.both(lambda side: side.operations.browse(limit=10_000))
            self.both(lambda side: side.operations.archived(limit=10_000))
            self.both(partial(_find, ids=self.ids))
        finally:
            self.run(self.real.close())
            self.loop.close()


def plain(claim: Claim) -> Claim:
    """A claim without the fields that differ between the sides."""
    return msgspec.structs.replace(claim, receipt=Receipt(claim.receipt.id, 0))


def run(backend: Backend, **how: Any) -> None:
    class OnThisBackend(Lives):
        pass

    OnThisBackend.backend = backend
    run_state_machine_as_test(
        OnThisBackend,
        settings=settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, **how),
    )


@pytest.fixture
def able(backend: Backend) -> Backend:
    async def look() -> Capability:
        backend.empty()
        transport = await backend.connect()
        await transport.close()
        return transport.capabilities

    missing = NEEDED & ~asyncio.run(look())
    if missing:
        pytest.skip(f"lacks {missing}")
    return backend


@pytest.mark.slow_on_servers
def test_lives_of_messages(able: Backend) -> None:
    """The same lives each time. A failing one is printed unshortened: to shorten it takes too long for a test."""
    phases = [Phase.explicit, Phase.generate]
    run(able, derandomize=True, database=None, max_examples=25, stateful_step_count=30, phases=phases)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_lives_of_messages(able: Backend) -> None:
    run(able, max_examples=1000, stateful_step_count=80)


async def _find(side: Transport, ids: list[UUID]) -> list[Row]:
    """These messages without their failed attempts, which the model does not keep."""
    return [msgspec.structs.replace(row, history=None) for row in await side.operations.find(ids)]


def _page(name: str, side: Any, **choice: Any) -> Any:
    return getattr(side.operations, name)(**choice)
