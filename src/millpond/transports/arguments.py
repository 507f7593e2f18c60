"""What callers hand to the verbs of any transport, checked and made plain: the same errors on every backend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args
from uuid import UUID

from millpond.clock import Seconds, micros
from millpond.errors import InvalidOption, InvalidTime
from millpond.message import SETTLED, Receipt, State, check_id, check_name, check_priority
from millpond.outcome import Outcome
from millpond.transport import Row

PAGE_LIMIT = 10_000
_OUTCOMES = set(get_args(Outcome))


def queue_names(queues: Sequence[str]) -> list[str]:
    """Each queue once; a single name is one queue, not its letters."""
    return list(dict.fromkeys(check_name(q, "queue") for q in ([queues] if isinstance(queues, str) else queues)))


def unique_ids(ids: Sequence[UUID]) -> list[UUID]:
    return list(dict.fromkeys(check_id(id_) for id_ in ([ids] if isinstance(ids, str | UUID) else ids)))


def states_among(states: Sequence[State] | None, allowed: Sequence[State], verb: str) -> list[State]:
    """The chosen states, or all that the verb knows."""
    if states is None:
        return list(allowed)
    given = [states] if isinstance(states, str) else states
    for state in given:
        if state not in allowed:
            raise InvalidOption(f"{verb} knows the states {', '.join(allowed)}, not {state!r}")
    return [state for state in allowed if state in given]


def whole_number(value: Any, option: str, highest: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or (highest is not None and value > highest):
        upto = "" if highest is None else f" to {highest:,}"
        raise InvalidOption(f"{option} must be a whole number from 0{upto}, not {value!r}")
    return value


def lease_to_claim(lease: Seconds) -> int:
    """A lease of nothing would have lapsed before its claim returned, and be reaped by it."""
    us = micros(lease, "lease")
    if us == 0:
        raise InvalidTime("lease must be more than 0 seconds")
    return us


def check_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Refuse what is no outcome, before anything is written."""
    if type(outcomes) in _OUTCOMES:
        raise InvalidOption("settle takes a list of outcomes: settle([Ack(claim.receipt)])")
    # By sets of types: most settles are of hundreds, and this is asked with each.
    for kind in {type(outcome) for outcome in outcomes} - _OUTCOMES:
        raise InvalidOption(
            "settle takes outcomes: Ack(claim.receipt), Nack(claim.receipt, delay=5), Reject(claim.receipt) or "
            f"GiveBack(claim.receipt), not {kind.__name__}"
        )
    check_receipts([outcome.receipt for outcome in outcomes])


def check_receipts(receipts: Iterable[Receipt]) -> None:
    for kind in {type(receipt) for receipt in receipts} - {Receipt}:
        raise InvalidOption(f"a receipt is needed, not {kind.__name__}; a claim has one: claim.receipt")


def check_settled(rows: Iterable[Row]) -> None:
    for state in {row.state for row in rows} - set(SETTLED):
        raise InvalidOption(f"record knows the states {', '.join(SETTLED)}, not {state}")


def page_size(limit: Any) -> int:
    return whole_number(limit, "limit", PAGE_LIMIT)


def live_position(after: Sequence[Any]) -> tuple[str, bool, int, int, UUID]:
    match after:
        case [str() as queue, bool() as suspect, int() as priority, int() as due, id_]:
            return check_name(queue, "queue"), suspect, check_priority(priority), due, check_id(id_)
    raise InvalidOption("after must be the position of a row from browse")


def archive_position(after: Sequence[Any]) -> tuple[int, UUID]:
    match after:
        case [int() as at, id_] if not isinstance(at, bool):
            return at, check_id(id_)
    raise InvalidOption("after must be the position of a row from archived")


def known_options(given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse an option that does not exist, with its nearest neighbour."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise InvalidOption(
                f"unknown option {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}")
            )
