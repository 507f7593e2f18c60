"""Requests and replies of the HTTP interface. The OpenAPI document is made from these types."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from millpond.message import DEFAULT_PRIORITY, LOWEST_PRIORITY, NAME_LIMIT, OnConflict, State, While

Name = Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)]
Priority = Annotated[int, Meta(ge=0, le=LOWEST_PRIORITY)]
Duration = Annotated[float, Meta(ge=0, le=3_155_760_000, description="in seconds")]
Count = Annotated[int, Meta(ge=0)]
Fingerprint = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=8192)]


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request. An unknown field is an error."""


class Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A reply. Fields without a value are left out."""


# --- messages --------------------------------------------------------------------------------------------


class PublishMessage(Request, kw_only=True, rename={"while_": "while"}):
    """A message to publish: `body` as JSON, or `base64` for any bytes."""

    body: msgspec.Raw | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    id: UUID | None = None
    key: Annotated[str, Meta(max_length=NAME_LIMIT)] | None = None
    priority: Priority = DEFAULT_PRIORITY
    delay: Duration | None = None
    due_at: datetime | None = None
    expires: Duration | None = None
    headers: dict[str, Any] = {}
    unique: Name | None = None
    """At most one message of the queue has this value, as long as `while` says."""
    while_: While | Duration | UnsetType = UNSET
    """waiting (default), unfinished, or the number of seconds since it was published."""
    on_conflict: OnConflict | UnsetType = UNSET
    """keep (default), replace or postpone the message that has the value, or raise: reply with 409."""


class PublishMany(Request, kw_only=True):
    messages: list[PublishMessage]


Effect = Literal["published", "kept", "replaced", "postponed"]


class PublishReply(Reply, kw_only=True):
    id: UUID
    new: bool
    """False: a message with this id or unique value was published before, and is the one with the returned id."""
    result: Effect | None = None
    """Of a message with `unique`: it was published, or the effect on the one that has the value."""


class PublishedMany(Reply, kw_only=True):
    published: list[PublishReply]


class ClaimRequest(Request, kw_only=True):
    queues: Annotated[list[Name], Meta(min_length=1, max_length=100)]
    limit: Annotated[int, Meta(ge=1, le=1000)] = 1
    lease: Annotated[float, Meta(ge=1, le=43_200, description="in seconds")] = 30.0
    wait: Annotated[float, Meta(ge=0, le=60, description="in seconds")] = 0.0
    """Longest time to wait for a message."""


class ClaimedMessage(Reply, kw_only=True):
    receipt: str
    id: UUID
    queue: str
    key: str | None = None
    priority: int
    headers: dict[str, Any] = {}
    body: Any = UNSET
    base64: str | UnsetType = UNSET
    """The body, if it is neither JSON nor text."""
    deliveries: int
    attempts: int
    """Attempts before this one."""
    created_at: datetime
    due_at: datetime
    leased_until: datetime


class Claimed(Reply, kw_only=True):
    claims: list[ClaimedMessage]


class ReceiptsRequest(Request, kw_only=True):
    receipts: list[str]


class ExtendRequest(ReceiptsRequest, kw_only=True):
    lease: Annotated[float, Meta(ge=1, le=43_200, description="in seconds")] = 30.0


class NackRequest(ReceiptsRequest, kw_only=True):
    delay: Duration | None = None
    """None: the queue's retry settings decide."""
    error: Text | None = None
    traceback: Annotated[str, Meta(max_length=65_536)] | None = None


class RejectRequest(ReceiptsRequest, kw_only=True):
    reason: Text = "rejected"
    error: Text | None = None
    traceback: Annotated[str, Meta(max_length=65_536)] | None = None


class Refused(Reply, kw_only=True):
    refused: list[str]
    """Receipts that are stale: another claim owns the message, or it is settled."""


# --- control ---------------------------------------------------------------------------------------------


class QueueReply(Reply, kw_only=True):
    queue: str
    counts: dict[str, int]
    approximate: bool = False
    paused: bool = False
    completed_per_second: float = 0.0
    failed_per_second: float = 0.0
    oldest_for: float | None = None
    """Seconds since the message that has waited longest was due."""


class Queues(Reply, kw_only=True):
    queues: list[QueueReply]


class HistoryQuery(Request, kw_only=True):
    queue: Name | None = None
    by: Literal["minute", "hour", "day"] = "minute"
    """Days are counted in the lake of the server's option --lake."""


class BucketReply(Reply, kw_only=True, omit_defaults=False):
    begin: datetime
    completed: int
    failed: int
    at_least: bool
    """True: there may be more. A count stopped at a limit, a shard did not answer, or a queue is not counted yet."""


class History(Reply, kw_only=True, omit_defaults=False):
    by: Literal["minute", "hour", "day"]
    buckets: list[BucketReply]
    """Oldest first: the last 60 minutes, 24 hours or 30 days, the present one among them."""
    complete: bool
    """False: some times are not counted yet. Ask again."""
    missing: list[str]
    """Shards that did not answer."""


class AttemptReply(Reply, kw_only=True):
    claimed_at: datetime
    ended_at: datetime
    took: float | None = None
    error: str | None = None
    traceback: str | None = None


class MessageReply(Reply, kw_only=True):
    id: UUID
    queue: str
    state: State
    key: str | None = None
    priority: int
    headers: dict[str, Any] = {}
    body: Any = UNSET
    base64: str | UnsetType = UNSET
    masked: bool = False
    """True: the caller may not read body, headers and errors."""
    deliveries: int
    attempts: int
    crashes: int = 0
    created_at: datetime
    due_at: datetime
    expires_at: datetime | None = None
    acquired_at: datetime | None = None
    leased_until: datetime | None = None
    archived_at: datetime | None = None
    reason: str | None = None
    error: str | None = None
    failed_attempts: list[AttemptReply] = []


class Messages(Reply, kw_only=True):
    messages: list[MessageReply]
    cursor: str | None = None
    read: int
    """Messages that were compared; a search for a text reads a bounded number."""


class MessagesQuery(Request, kw_only=True):
    queue: Name | None = None
    state: list[State] = []
    key: str | None = None
    reason: str | None = None
    error: str | None = None
    text: str | None = None
    path: str | None = None
    """A value within a JSON body: `customer.id=7`."""
    since: datetime | None = None
    until: datetime | None = None
    failure: Fingerprint | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    cursor: str | None = None


class FailuresQuery(Request, kw_only=True):
    queue: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class FailureReply(Reply, kw_only=True):
    queue: str
    fingerprint: int
    messages: int
    oldest_at: datetime
    newest_at: datetime
    id: UUID
    reason: str | None = None
    error: str | None = None


class Failures(Reply, kw_only=True):
    failures: list[FailureReply]


class IdsRequest(Request, kw_only=True):
    ids: Annotated[list[UUID], Meta(min_length=1)]


class RescheduleRequest(IdsRequest, kw_only=True):
    priority: Priority | None = None
    delay: Duration | None = None
    due_at: datetime | None = None
    attempts: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None


class DoneRequest(IdsRequest, kw_only=True):
    force: bool = False
    """Also claimed ones: the result of their handler is then refused."""


class CancelRequest(IdsRequest, kw_only=True):
    reason: Text = "cancelled"
    running: bool = False
    """Also ask workers to cancel the messages that they run."""


class CancelledReply(Reply, kw_only=True):
    ids: list[UUID]
    requested: list[UUID] = []
    """Running messages, which their workers cancel within seconds."""


class PeriodicEntry(Reply, kw_only=True):
    name: str
    queue: str
    schedule: str
    timezone: str
    missed: str
    paused: bool = False
    next_at: datetime
    last_at: datetime | None = None
    error: str | None = None


class PeriodicReply(Reply, kw_only=True):
    periodic: list[PeriodicEntry]


class PeriodicRequest(Request, kw_only=True):
    name: Name
    schedule: Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)] | None = None
    timezone: Annotated[str, Meta(min_length=1, max_length=NAME_LIMIT)] | None = None
    missed: Literal["skip", "once", "all"] | None = None
    queue: Name | None = None
    paused: bool | None = None


class Changed(Reply, kw_only=True):
    ids: list[UUID]


class RetriedReply(Reply, kw_only=True):
    published: list[UUID] = []
    due_now: list[UUID] = []
    already_retried: list[UUID] = []
    skipped: dict[str, str] = {}
    matching: int | None = None
    """Messages that match: of a preview, or of a retry that continues in the background."""
    complete: bool = True
    """False: it stopped at a limit, and more messages may match; call again, or give a rate."""
    in_background: bool = False


class RetryQueueRequest(Request, kw_only=True):
    key: str | None = None
    reason: str | None = None
    error: str | None = None
    text: str | None = None
    """Text that the body contains."""
    path: str | None = None
    """A value within a JSON body: `customer.id=7`."""
    failure: Fingerprint | None = None
    since: datetime | None = None
    until: datetime | None = None
    limit: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    rate: Annotated[float, Meta(gt=0, le=100_000, description="messages per second")] | None = None
    """With a rate the retry continues after the reply."""
    preview: bool = False
    """Count, and retry none."""


class RetryPolicy(Request, kw_only=True):
    """Waits between attempts; a missing field has its default."""

    initial: Duration = 1.0
    """Wait after the first error."""
    multiplier: Annotated[float, Meta(ge=1, le=1_000_000)] = 2.0
    step: Duration = 0.0
    maximum: Duration = 300.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.33
    attempts: Annotated[int, Meta(ge=0, le=1_000_000)] = 8
    """Handler runs until FAILED; 0: no limit."""
    total: Duration | None = None
    first: Literal["immediate", "backoff"] = "backoff"


class SettingsQuery(Request, kw_only=True):
    queue: Name | None = None


class SettingsRequest(Request, kw_only=True):
    """Settings to change: null is the default. A field that is left out stays as it is."""

    lease: Duration | UnsetType | None = UNSET
    retry: RetryPolicy | UnsetType | None = UNSET
    max_crashes: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType | None = UNSET
    """0: no limit."""
    max_deliveries: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType | None = UNSET
    """0: no limit."""
    keep_completed: Duration | UnsetType | None = UNSET
    """How long the archive keeps messages; null: permanently."""
    keep_failed: Duration | UnsetType | None = UNSET


class SettingsReply(Reply, kw_only=True):
    """Settings of a queue. A missing one has its default."""

    queue: str
    paused: bool = False
    lease: float | None = None
    retry: RetryPolicy | None = None
    max_crashes: int | None = None
    max_deliveries: int | None = None
    keep_completed: float | None = None
    keep_failed: float | None = None


class SettingsList(Reply, kw_only=True):
    settings: list[SettingsReply]


class PurgeRequest(Request, kw_only=True):
    older_than: Duration | None = None
    until: datetime | None = None
    states: list[State] = []


class Purged(Reply, kw_only=True):
    purged: int


class ReplayRequest(Request, kw_only=True):
    name: Name
    states: list[State] = []
    since: datetime | None = None
    until: datetime | None = None
    to: Name | None = None


class ReplayReply(Reply, kw_only=True):
    published: list[UUID]


class ReasonReply(Reply, kw_only=True):
    kind: str
    text: str
    remedy: str = ""


class WhyReply(Reply, kw_only=True):
    id: UUID
    queue: str | None = None
    state: State | None = None
    reasons: list[ReasonReply]
    """The first is the one to act on."""


class FindingReply(Reply, kw_only=True):
    kind: str
    severity: str
    text: str
    remedy: str


class Findings(Reply, kw_only=True):
    findings: list[FindingReply]


class WorkerReply(Reply, kw_only=True):
    id: str
    name: str
    queues: list[str] | None = None
    started_at: datetime
    beat_at: datetime
    silent_for: float
    beats: bool
    stopping: bool = False
    held: int
    oldest_held_at: datetime | None = None


class WorkersReply(Reply, kw_only=True):
    workers: list[WorkerReply]


class ShardReply(Reply, kw_only=True):
    name: str
    key_ranges: list[str]
    answers: bool
    seconds: float | None = None
    live: int | None = None


class ShardsReply(Reply, kw_only=True):
    shards: list[ShardReply]


class StreamReply(Reply, kw_only=True):
    name: str
    epoch: int
    acked_seq: int
    held: int
    held_for: float | None = None
    queues: list[str] = []
    """Queues of messages that it holds."""
    waiting: int | None = None
    """Due messages of these queues that are not claimed."""
    waiting_complete: bool = True
    """False: more messages wait than were counted."""
    behind: float | None = None
    """Seconds since the first of them was due."""
    opened_at: datetime | None = None


class StreamsReply(Reply, kw_only=True):
    streams: list[StreamReply]


class Released(Reply, kw_only=True):
    released: int


class ActionReply(Reply, kw_only=True):
    at: datetime
    actor: str
    action: str
    queue: str | None = None
    detail: Any = None


class ActionsQuery(Request, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Actions(Reply, kw_only=True):
    actions: list[ActionReply]


class Done(Reply, kw_only=True):
    done: bool


class Health(Reply, kw_only=True):
    ok: bool
    obstacle: str | None = None


class Problem(Reply, kw_only=True):
    error: str
    """Kind of the error, e.g. InvalidMessage."""
    message: str
    """The event, its place, and the remedy."""
    id: UUID | None = None
    """With NotUnique: the message that has the unique value."""
