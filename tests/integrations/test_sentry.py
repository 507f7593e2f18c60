"""Events and traces that the SDK of Sentry would send."""

from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.dedupe import DedupeIntegration
from sentry_sdk.integrations.logging import LoggingIntegration
from sentry_sdk.transport import Transport

from millpond import Millpond, RejectMessage, Retry
from millpond.integrations.sentry import instrument


class Recorded(Transport):
    def __init__(self) -> None:
        super().__init__({"dsn": "http://key@localhost/1"})
        self.payloads: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.payloads += [item.payload.json for item in envelope.items if item.payload.json is not None]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    transport = Recorded()
    with sentry_sdk.isolation_scope(), sentry_sdk.new_scope() as scope:
        client = sentry_sdk.Client(
            dsn="http://key@localhost/1",
            transport=transport,
            traces_sample_rate=1.0,
            default_integrations=False,
            integrations=[LoggingIntegration(), DedupeIntegration()],  # the defaults that matter here
        )
        scope.set_client(client)
        yield transport
        client.close(timeout=0)


async def test_an_error_is_reported_with_its_message_and_trace(recorded: Recorded) -> None:
    pond = Millpond("memory://")
    instrument(pond)

    @pond.subscriber("q")
    async def handle(body: str) -> None:
        if body == "error":
            raise ValueError("broken")
        raise RejectMessage("no")

    async with pond.testing(raise_errors=False) as test:
        with sentry_sdk.start_transaction(name="request") as request:
            id_ = await pond.publish("q", "error")
            await pond.publish("q", "reject")
        await test.run()
    errors = [payload for payload in recorded.payloads if "exception" in payload]
    (error,) = errors
    assert error["exception"]["values"][0]["type"] == "ValueError"
    assert error["contexts"]["millpond"]["id"] == str(id_)
    assert error["tags"]["millpond.queue"] == "q"
    assert error["contexts"]["trace"]["trace_id"] == request.trace_id
    spans = [payload for payload in recorded.payloads if payload.get("type") == "transaction"]
    processed = [span for span in spans if span["contexts"]["trace"]["op"] == "queue.process"]
    assert sorted(p["contexts"]["trace"]["status"] for p in processed) == ["internal_error", "ok"]
    assert {p["contexts"]["trace"]["trace_id"] for p in processed} == {request.trace_id}


@pytest.mark.parametrize("kind", ["async", "thread", "batch"])
async def test_a_failure_is_one_event_although_the_worker_logs_it(recorded: Recorded, kind: str) -> None:
    pond = Millpond("memory://")
    instrument(pond)
    instrument(Millpond("memory://"))

    async def handle(body: Any) -> None:
        raise ValueError("broken")

    def handle_in_thread(body: Any) -> None:
        raise ValueError("broken")

    options: Any = {"batch": 5} if kind == "batch" else {}
    pond.subscriber("q", retry=Retry(attempts=1), **options)(handle_in_thread if kind == "thread" else handle)
    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", 1)
        await test.run()
    (error,) = [payload for payload in recorded.payloads if "exception" in payload]
    assert error["contexts"]["millpond"]["attempt"] == 1


@pytest.mark.parametrize("wanted", [False, True])
async def test_bodies_are_sent_only_if_local_variables_are_wanted(recorded: Recorded, wanted: bool) -> None:
    pond = Millpond("memory://")
    instrument(pond, local_variables=wanted)

    @pond.subscriber("q")
    async def handle(body: str) -> None:
        sentry_sdk.capture_message(f"a message of {len(body)} letters")
        try:
            raise KeyError("inner")
        except KeyError as e:
            raise ValueError("outer") from e

    async with pond.testing(raise_errors=False) as test:
        await pond.publish("q", "4111" * 4)
        await test.run()
    (error,) = [payload for payload in recorded.payloads if "exception" in payload]
    assert [value["type"] for value in error["exception"]["values"]] == ["KeyError", "ValueError"]
    assert ("4111" * 4 in str(recorded.payloads)) is wanted
