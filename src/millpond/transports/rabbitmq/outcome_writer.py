"""Writes outcomes: records them in the archive if there is one, publishes copies, and then acks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import structs

from millpond.errors import DataRefused, InvalidMessage, MillpondError, StoreError, StoreUnavailable
from millpond.message import SETTLED, SUSPECT, Receipt, State
from millpond.outcome import Change, Outcome, change
from millpond.seam.operations import Operations, Row
from millpond.transports.rabbitmq.channel import Channel
from millpond.transports.rabbitmq.copies import copy_for_outcome, copy_with_crash, envelope_after
from millpond.transports.rabbitmq.envelope import settled_row
from millpond.transports.rabbitmq.lost_acks import identity
from millpond.transports.rabbitmq.outgoing import OutgoingMessage
from millpond.transports.rabbitmq.receipts import HeldDelivery, Receipts
from millpond.transports.rabbitmq.republish import Republish, SendEach, replacement
from millpond.transports.validation import check_outcomes

log = logging.getLogger("millpond.rabbitmq")

Copied = tuple[HeldDelivery, OutgoingMessage]


class OutcomeWriter:
    """Settles held deliveries. If one is lost before its ack, the broker delivers it again, marked as redelivered."""

    def __init__(
        self,
        receipts: Receipts,
        send: SendEach,
        now: Callable[[], int],
        archive: Operations | None,
        *,
        counts_deliveries: bool,
        wait_until_blocked: Callable[[], Coroutine[Any, Any, None]],
        republish: Callable[[Republish], None],
        can_reject: Callable[[str], bool],
    ) -> None:
        self._receipts = receipts
        self._send = send
        self._now = now
        self._archive = archive
        self._wait_until_blocked = wait_until_blocked
        self._republish = republish
        self._can_reject = can_reject
        self._unfinished: set[asyncio.Task[None]] = set()
        self._counts_deliveries = counts_deliveries
        """True if queues count requeued deliveries."""

    async def settle(self, outcomes: Sequence[Outcome], *, later: bool = False) -> list[Receipt]:
        """Write outcomes and return the stale receipts.

        `later`: a copy that is refused now is published in the background. It is no error.
        """
        check_outcomes(outcomes)
        changes: dict[Receipt, Change] = {}
        for outcome in outcomes:  # all are read before the first is written; of two with one receipt the first counts
            changes.setdefault(outcome.receipt, change(outcome))
        if self._archive is not None:
            await self._record(self._archive, changes)
        held: list[HeldDelivery] = []
        refused = []
        for receipt, c in changes.items():
            delivery = self._receipts.take(receipt)
            if delivery is not None:
                held.append(delivery)
            elif not self._receipts.was_settled(receipt, c.state):
                refused.append(receipt)
        if held:
            refused += await self._settle(held, changes, later)
        return refused

    async def give_back(self, held: Sequence[HeldDelivery]) -> None:
        """Return deliveries to their queues, as crashes: their handlers hang."""
        if self._counts_deliveries:
            await self._requeue(held)
            return
        for delivery in held:  # in the background: no claim waits for, or fails by, a copy that cannot be published
            self._republish(replacement(delivery.received, copy_with_crash(delivery.received)))

    async def _record(self, archive: Operations, changes: dict[Receipt, Change]) -> None:
        """Record settled messages while they are still held: a heartbeat keeps their leases meanwhile."""
        now = self._now()
        rows = []
        for receipt, c in changes.items():
            delivery = self._receipts.get(receipt) if c.keep and c.state in SETTLED else None
            if delivery is not None:
                rows.append(settled_row(envelope_after(delivery, c, now), c.state, acquired_us=delivery.claimed_us))
        if rows:
            await record(archive, rows)

    async def _settle(self, held: Sequence[HeldDelivery], changes: dict[Receipt, Change], later: bool) -> list[Receipt]:
        """Outcomes without a copy go first: a broker short of memory takes acks and no publishes."""
        now = self._now()
        copied: list[Copied] = []
        acked = []
        for delivery in held:
            copy = copy_for_outcome(delivery, changes[delivery.receipt], now)
            if copy is None:
                acked.append(delivery)
            else:
                copied.append((delivery, copy))
        waiting = {delivery.receipt: delivery for delivery, _ in copied}
        try:
            lost = set(await self._ack(acked, changes))
            if copied:
                lost |= await self._settle_copied(copied, changes, waiting, later)
        finally:
            for delivery in waiting.values():  # after an error they stay held
                self._receipts.put_back(delivery)
        return list(lost)

    async def _settle_copied(
        self,
        copied: Sequence[Copied],
        changes: dict[Receipt, Change],
        waiting: dict[Receipt, HeldDelivery],
        later: bool,
    ) -> set[Receipt]:
        """Publish copies, then ack. A copy that is refused holds up no other, and is the only one to be sent again."""
        errors = await self._send_or_defer(copied)
        if errors is None:
            for delivery, _ in copied:
                del waiting[delivery.receipt]
            self._remember(changes, [delivery for delivery, _ in copied])
            return set()
        stored: list[HeldDelivery] = []
        refused: list[tuple[Copied, Exception]] = []
        for each, error in zip(copied, errors, strict=True):
            delivery, copy = each
            if error is not None:
                refused.append((each, error))
                continue
            stored.append(delivery)
            del waiting[delivery.receipt]
            if copy.envelope.meta.crashes >= SUSPECT:
                delivery.consumer.suspects_known = True
        lost = set(await self._ack(stored, changes))
        failures = []
        for each, error in refused:
            try:
                if not isinstance(error, InvalidMessage):
                    raise error
                lost |= await self._reject(each, changes, waiting, error)
            except Exception as e:
                if not later:
                    failures.append(e)
                    continue
                delivery, copy = each
                waiting.pop(delivery.receipt, None)
                self._publish_later(delivery, copy)
                self._remember(changes, [delivery])
        if failures:
            raise failures[0]
        return lost

    async def _reject(
        self, copied: Copied, changes: dict[Receipt, Change], waiting: dict[Receipt, HeldDelivery], error: Exception
    ) -> set[Receipt]:
        """Let the broker move a message to the dead letters, because no copy of it can be published."""
        delivery, copy = copied
        if not (delivery.received.broker_may_move and self._can_reject(copy.queue)):
            raise error
        log.error("message %s cannot be published again; it goes to the dead letters: %s", delivery.receipt.id, error)
        if self._archive is not None and copy.envelope.meta.failed_us is None:
            failed = copy.envelope.with_meta(failed_us=self._now(), reason="too large", error=str(error))
            await record(self._archive, [settled_row(failed, State.FAILED, acquired_us=delivery.claimed_us)])
        del waiting[delivery.receipt]
        try:
            await delivery.received.channel.reject([delivery.received.tag])
        except StoreUnavailable:
            return {delivery.receipt}
        self._remember(changes, [delivery])
        return set()

    async def _send_or_defer(self, copied: Sequence[Copied]) -> list[Exception | None] | None:
        """Publish copies. None: the broker blocks publishes, and they are finished in the background.

        Until then their deliveries stay unacked: if this process dies, they come again.
        """
        sending = asyncio.create_task(self._copy(copied))
        blocked = asyncio.create_task(self._wait_until_blocked())
        try:
            await asyncio.wait({sending, blocked}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            sending.cancel()
            raise
        finally:
            blocked.cancel()
        if sending.done():
            return sending.result()
        task = asyncio.ensure_future(self._finish(sending, copied))
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        return None

    async def _copy(self, copied: Sequence[Copied]) -> list[Exception | None]:
        return await self._send([copy for _, copy in copied])

    async def _finish(self, sending: asyncio.Task[list[Exception | None]], copied: Sequence[Copied]) -> None:
        try:
            errors = await sending
        except Exception as e:
            errors = [e] * len(copied)
        await self._ack([delivery for (delivery, _), error in zip(copied, errors, strict=True) if error is None])
        refused = [(each, error) for each, error in zip(copied, errors, strict=True) if error is not None]
        if refused:
            log.warning("outcomes are written later: %d (%s)", len(refused), refused[0][1])
        for (delivery, copy), _ in refused:
            self._publish_later(delivery, copy)

    def _publish_later(self, delivery: HeldDelivery, copy: OutgoingMessage) -> None:
        self._republish(replacement(delivery.received, copy))

    def cancel(self) -> None:
        for task in self._unfinished:
            task.cancel()

    def _note_acked(self, changes: dict[Receipt, Change], held: Sequence[HeldDelivery]) -> None:
        for delivery in held:
            # The copy of a delivery that does not count is equal to the message itself.
            if not changes[delivery.receipt].deliveries:
                received = delivery.received
                acked = identity(received.envelope, by_suspects_queue=received.by_suspects_queue)
                received.channel.note_acked(acked)

    def _remember(self, changes: dict[Receipt, Change], held: Sequence[HeldDelivery]) -> None:
        for delivery in held:
            self._receipts.remember(delivery.receipt, changes[delivery.receipt].state)

    async def _ack(self, held: Sequence[HeldDelivery], changes: dict[Receipt, Change] | None = None) -> list[Receipt]:
        """Ack deliveries, remember their outcomes, and return the receipts whose channel is lost."""
        lost = []
        for channel, some in _by_channel(held).items():
            try:
                await channel.ack([delivery.received.tag for delivery in some])
            except StoreUnavailable:
                lost += [delivery.receipt for delivery in some]
            else:
                if changes is not None:
                    self._note_acked(changes, some)
                    self._remember(changes, some)
        return lost

    async def _requeue(self, held: Sequence[HeldDelivery]) -> list[Receipt]:
        """Requeue deliveries and return the receipts whose channel is lost."""
        lost = []
        for delivery in held:
            delivery.consumer.suspects_known = True  # it may be one now
        for channel, some in _by_channel(held).items():
            try:
                await channel.requeue([delivery.received.tag for delivery in some], counted=True)
            except StoreUnavailable:
                lost += [delivery.receipt for delivery in some]
        return lost


def _by_channel(held: Sequence[HeldDelivery]) -> dict[Channel, list[HeldDelivery]]:
    groups: dict[Channel, list[HeldDelivery]] = {}
    for delivery in held:
        groups.setdefault(delivery.received.channel, []).append(delivery)
    return groups


async def record(archive: Operations, rows: Sequence[Row]) -> None:
    """Record rows. One that the database refuses is recorded without the fields that other publishers can write."""
    try:
        await archive.record(rows)
    except Exception as e:
        if not _is_about_rows(e):
            raise
        await _record_parts(archive, rows, e)


def _is_about_rows(error: Exception) -> bool:
    """False: the database itself is away or not usable."""
    return type(error) in (StoreError, DataRefused) or not isinstance(error, MillpondError)


async def _record_parts(archive: Operations, rows: Sequence[Row], error: Exception) -> None:
    if len(rows) > 1:
        half = len(rows) // 2
        await record(archive, rows[:half])
        await record(archive, rows[half:])
        return
    (row,) = rows
    plain = structs.replace(row, key=None, headers={}, error=None)
    body = f"its body of {len(row.payload):,} bytes was not archived: {error}"
    for less, lacks in (
        (structs.replace(row, payload=b"", error=body), "body"),
        (plain, "key, headers and error"),
        (structs.replace(plain, payload=b"", error=body), "body, key and headers"),
    ):
        try:
            await archive.record([less])
        except Exception as e:
            if not _is_about_rows(e):
                raise
            error = e
        else:
            log.error("message %s is archived without its %s: %s", row.id, lacks, error)
            return
    log.error("message %s is not archived: %s", row.id, error)
