"""Log lines of handlers have the facts of their message."""

from typing import Any

import structlog
from structlog.testing import LogCapture

from millpond import Millpond
from millpond.integrations.structlog import instrument


async def test_log_lines_have_the_facts_of_their_message() -> None:
    pond, capture = Millpond("memory://"), LogCapture()
    log: Any = structlog.wrap_logger(None, processors=[structlog.contextvars.merge_contextvars, capture])
    instrument(pond)

    @pond.subscriber("orders")
    def ship(order: int) -> None:
        log.info("shipped")

    @pond.subscriber("mails")
    async def send(mail: int) -> None:
        log.info("sent")

    async with pond.testing() as test:
        order = await pond.publish("orders", 1, headers={"correlation-id": "c-1"})
        mail = await pond.publish("mails", 1)
        await test.run()
        log.info("outside")
    lines = {line["event"]: line for line in capture.entries}
    assert lines["shipped"]["message_id"] == str(order)
    assert (lines["shipped"]["correlation_id"], lines["shipped"]["attempt"]) == ("c-1", 1)
    assert (lines["sent"]["message_id"], lines["sent"]["queue"]) == (str(mail), "mails")
    assert "message_id" not in lines["outside"]
