"""Settings that are stored with a queue: lease, retry policy, limits, retention."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from millpond.clock import SECOND, seconds
from millpond.message import check_name
from millpond.retry import Retry
from millpond.seam.settings import QueueSettings
from millpond.server import types
from millpond.server.handlers.call import Call


async def settings(call: Call) -> types.SettingsList:
    """Settings of all queues that have any, or of one."""
    name: str | None = call.query.queue
    if name is not None:
        call.need(check_name(name, "queue"))
    found = await call.control.operations.settings(None if name is None else [name])
    return types.SettingsList(settings=[_reply(one) for one in found if call.grant.reaches(one.queue)])


async def change_settings(call: Call) -> types.SettingsReply:
    """Change settings of a queue; null removes one. Workers follow within a second."""
    body: types.SettingsRequest = call.body
    operations = call.control.operations
    changes = {name: getattr(body, name) for name in ("lease", "max_crashes", "max_deliveries")}
    changes = {name: value for name, value in changes.items() if value is not UNSET}
    if body.retry is not UNSET:
        changes["retry"] = None if body.retry is None else _policy(body.retry)
    if changes:
        await operations.configure(call.queue, **changes)
    (now,) = await operations.settings([call.queue])
    if body.keep_completed is not UNSET or body.keep_failed is not UNSET:
        await operations.retain(
            call.queue,
            completed=_seconds(now.keep_completed_us) if body.keep_completed is UNSET else body.keep_completed,
            failed=_seconds(now.keep_failed_us) if body.keep_failed is UNSET else body.keep_failed,
        )
        (now,) = await operations.settings([call.queue])
    return _reply(now)


def _policy(given: types.RetryPolicy) -> Retry:
    values = msgspec.structs.asdict(given)
    return Retry(**{**values, "attempts": given.attempts or None})


def _reply(found: QueueSettings) -> types.SettingsReply:
    policy = None
    if (retry := found.retry) is not None:
        policy = types.RetryPolicy(
            initial=seconds(retry.initial),
            multiplier=retry.multiplier,
            step=seconds(retry.step),
            maximum=seconds(retry.maximum),
            jitter=retry.jitter,
            attempts=retry.attempts or 0,
            total=None if retry.total is None else seconds(retry.total),
            first=retry.first,
        )
    return types.SettingsReply(
        queue=found.queue,
        paused=found.paused,
        lease=_seconds(found.lease_us),
        retry=policy,
        max_crashes=found.max_crashes,
        max_deliveries=found.max_deliveries,
        keep_completed=_seconds(found.keep_completed_us),
        keep_failed=_seconds(found.keep_failed_us),
    )


def _seconds(us: int | None) -> float | None:
    return None if us is None else us / SECOND
