"""Requests to cancel running messages, while operators and workers change them at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from millpond.ids import id_from
from millpond.transports.database.sql.statement import Query
from millpond.transports.database.store import DatabaseStore
from millpond.transports.database.workers.cancel import forget_requests


async def test_a_request_that_is_entered_meanwhile_is_not_forgotten(store: DatabaseStore) -> None:
    runner = store.workers.runner
    d = runner.dialect
    id_ = d.id_in(id_from("cancel", "test"))
    enter = d.sql("INSERT INTO {cancel} (id, token, reason) VALUES (:id, :token, 'x')")

    def forget_beside_an_operator() -> Generator[Any, Any, list[int]]:
        yield Query(enter, {"id": id_, "token": 1})
        steps = forget_requests(d)
        rows = yield next(steps)
        yield Query(d.sql("DELETE FROM {cancel} WHERE id = :id"), {"id": id_})
        yield Query(enter, {"id": id_, "token": 2})
        try:
            step = steps.send(rows)
            while True:
                step = steps.send((yield step))
        except StopIteration:
            return [token for (token,) in (yield Query(d.sql("SELECT token FROM {cancel}"), {}))]

    assert await runner.write(forget_beside_an_operator) == [2]
