"""Work steps of handlers: which delivery owns one, and its result.

An owner is a receipt. It owns the step while the receipt is current, so a step is free again as soon as the reaper, a
settle or a give-back has ended the delivery: nothing else has to release it.
"""

from __future__ import annotations

from millpond.errors import BodyTooLarge
from millpond.message import Receipt
from millpond.seam.workers import Step, StepClaim
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

_IS_CURRENT = "SELECT 1 FROM {message} {id_index} WHERE id = :message AND token = :token AND state = 'PROCESSING'"
# A conflict locks the row: deliveries that want one step go one by one.
_ENTER = """
INSERT INTO {step} (id, scope, name, message, token, result, at)
VALUES (:id, :scope, :name, :message, :token, NULL, {now}) {or_lock}
"""
_OWNER = "SELECT message, token, result FROM {step} WHERE id = :id {lock}"
_TAKE_OVER = "UPDATE {step} SET message = :message, token = :token, at = {now} WHERE id = :id"
_FINISH = """
UPDATE {step} SET result = :result, at = {now}
WHERE id = :id AND message = :message AND token = :token AND result IS NULL
"""
# Not while a message of the id lives: it may be delivered again.
_OLD = """
SELECT s.id FROM {step} s WHERE s.at <= {now} - :age
AND NOT EXISTS (SELECT 1 FROM {message} m {id_index} WHERE m.id = s.message) LIMIT :limit
"""
_FORGET = "DELETE FROM {step} WHERE id {ids} AND at <= {now} - :age"


def check_result(step: Step, result: bytes, limit: int) -> None:
    """Refuse a result that a server might not take: it would look like an outage, and the work would run again."""
    if len(result) > limit:
        raise BodyTooLarge(
            f"the result of step {step.name!r} has {len(result):,} bytes, the limit is {limit:,}; "
            "store large data elsewhere and return a reference, or raise the option body_limit"
        )


def begin_step(d: Dialect, receipt: Receipt, step: Step, now: int | None) -> Steps[StepClaim]:
    """Own a step, unless it is done or another delivery that lives owns it."""
    own = {"message": d.id_in(receipt.id), "token": receipt.token}
    if not (yield Query(d.sql(_IS_CURRENT), own)):
        return StepClaim("stale")
    id_ = d.id_in(step.id)
    yield Query(d.sql(_ENTER), {"id": id_, "scope": step.scope, "name": step.name, **own, "now": now})
    ((message, token, result),) = yield Query(d.sql(_OWNER), {"id": id_})
    if result is not None:
        return StepClaim("done", bytes(result))
    if (d.id_out(message), token) == (receipt.id, receipt.token):
        return StepClaim("owned")
    # A receipt that is stale stays so: it never owns the step again.
    if (yield Query(d.sql(_IS_CURRENT), {"message": d.id_in(d.id_out(message)), "token": token})):
        return StepClaim("held")
    yield Query(d.sql(_TAKE_OVER), {"id": id_, **own, "now": now})
    return StepClaim("owned")


def finish_step(d: Dialect, receipt: Receipt, step: Step, result: bytes, now: int | None) -> Steps[bool]:
    """Store the result; False if the receipt is stale. The message is locked, so that it stays current meanwhile."""
    own = {"message": d.id_in(receipt.id), "token": receipt.token}
    if not (yield Query(d.sql(_IS_CURRENT + " {lock}"), own)):
        return False
    id_ = d.id_in(step.id)
    yield Query(d.sql(_FINISH), {"id": id_, **own, "result": result, "now": now})
    rows = yield Query(d.sql(_OWNER), {"id": id_})
    return any((d.id_out(m), t) == (receipt.id, receipt.token) and stored is not None for m, t, stored in rows)


def forget_steps(d: Dialect, age: int, now: int | None, limit: int) -> Steps[int]:
    """Delete steps that are older than `age` microseconds and whose message is gone; returns their number."""
    rows = yield Query(d.sql(_OLD), {"age": age, "now": now, "limit": limit})
    if rows:
        yield Query(d.sql(_FORGET), {"ids": [row[0] for row in rows], "age": age, "now": now})
    return len(rows)
