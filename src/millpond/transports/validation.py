"""Checks of the arguments of verbs: the same errors on every backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args
from uuid import UUID

from millpond.checks import integer
from millpond.clock import Seconds, micros
from millpond.errors import InvalidOption, InvalidTime
from millpond.message import SETTLED, Receipt, State, check_id, check_name, check_priority
from millpond.outcome import Outcome
from millpond.seam.operations import Row

PAGE_LIMIT = 10_000
_OUTCOMES = set(get_args(Outcome))


def queue_names(queues: Sequence[str]) -> list[str]:
    """Each queue once. A single text is one queue, not its letters."""
    return list(dict.fromkeys(check_name(q, "queue") for q in ([queues] if isinstance(queues, str) else queues)))


def unique_ids(ids: Sequence[UUID]) -> list[UUID]:
    return list(dict.fromkeys(check_id(id_) for id_ in ([ids] if isinstance(ids, str | UUID) else ids)))


def states_among(states: Sequence[State] | None, allowed: Sequence[State], verb: str) -> list[State]:
    """The chosen states, or all that the verb has."""
    if states is None:
        return list(allowed)
    given = [states] if isinstance(states, str) else states
    for state in given:
        if state not in allowed:
            raise InvalidOption(f"{verb} takes the states {' and '.join(allowed)}, not {state}")
    return [state for state in allowed if state in given]


def lease_to_claim(lease: Seconds) -> int:
    """Lease in microseconds. One of 0 seconds would be reaped by its own claim."""
    us = micros(lease, "lease")
    if us == 0:
        raise InvalidTime("lease must be more than 0 seconds")
    return us


def check_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Refuse values that are not outcomes, before anything is written."""
    if type(outcomes) in _OUTCOMES:
        raise InvalidOption("settle takes a list of outcomes: settle([Ack(claim.receipt)])")
    # By sets of types, because most settles have hundreds of outcomes.
    for kind in {type(outcome) for outcome in outcomes} - _OUTCOMES:
        raise InvalidOption(
            "settle takes outcomes: Ack(claim.receipt), Nack(claim.receipt, delay=5), Reject(claim.receipt) or "
            f"GiveBack(claim.receipt), not {kind.__name__}"
        )
    check_receipts([outcome.receipt for outcome in outcomes])


def check_receipts(receipts: Iterable[Receipt]) -> None:
    for kind in {type(receipt) for receipt in receipts} - {Receipt}:
        raise InvalidOption(f"a receipt is required, not {kind.__name__}; pass that of the claim: claim.receipt")


def check_settled(rows: Iterable[Row]) -> None:
    for state in {row.state for row in rows} - set(SETTLED):
        raise InvalidOption(f"record takes the states {' and '.join(SETTLED)}, not {state}")


def page_size(limit: Any) -> int:
    return integer(limit, "limit", 0, PAGE_LIMIT)


def live_position(after: Sequence[Any]) -> tuple[str, bool, int, int, UUID]:
    match after:
        case [str() as queue, bool() as suspect, int() as priority, int() as due, id_] if _is_stored(due):
            return check_name(queue, "queue"), suspect, check_priority(priority), due, check_id(id_)
    raise InvalidOption("after must be the position of a row from browse")


def archive_position(after: Sequence[Any]) -> tuple[int, UUID]:
    match after:
        case [int() as at, id_] if not isinstance(at, bool) and _is_stored(at):
            return at, check_id(id_)
    raise InvalidOption("after must be the position of a row from archived")


def _is_stored(number: int) -> bool:
    """Whether a column of 64 bits can have this number."""
    return -(2**63) <= number < 2**63
