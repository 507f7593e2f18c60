"""Outcomes are settled in halves when the database refuses a value among them: only that message stays unsettled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from millpond.errors import DataRefused, StoreBusy
from millpond.message import Receipt
from millpond.outcome import Outcome


async def settle_in_halves(
    settle: Callable[[Sequence[Outcome]], Awaitable[list[Receipt]]], outcomes: Sequence[Outcome], error: DataRefused
) -> list[Receipt]:
    """Write all outcomes that can be written, by halves; returns the stale receipts.

    One error names the messages that are left, after all others.
    """
    if len(outcomes) == 1:
        receipt = outcomes[0].receipt
        raise DataRefused(f"the message {receipt.id} cannot be settled: {error}", [receipt]) from error
    half = len(outcomes) // 2
    refused: list[Receipt] = []
    left: list[Receipt] = []
    errors: list[DataRefused | StoreBusy] = []
    for part in (outcomes[:half], outcomes[half:]):
        try:
            refused += await settle(part)
        except (DataRefused, StoreBusy) as e:
            errors.append(e)
            refused += e.refused
            left += e.receipts or [outcome.receipt for outcome in part]
    if not errors:
        return refused
    busy = next((e for e in errors if isinstance(e, StoreBusy)), None)
    if busy is not None:
        locked = StoreBusy(str(busy), left, refused)
        locked.again = True
        raise locked from busy
    first = str(errors[0]).partition(_OTHERS)[0]
    text = f"{first}{_OTHERS}{len(left)} in all, the other outcomes were written"
    raise DataRefused(text, left, refused) from errors[0]


_OTHERS = "; messages that cannot be settled: "
