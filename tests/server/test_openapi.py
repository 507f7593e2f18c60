"""The OpenAPI document describes every route, and no request like those it describes is a server error."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, strategies

from millpond.server.openapi import document
from millpond.server.routes import ROUTES
from millpond.server.run_server import RunningServer
from millpond.server.settings import Limits
from tests.server.live import live_server

DOCUMENT = json.loads(document(ROUTES))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    url = f"sqlite:///{tmp_path_factory.mktemp('openapi') / 'pond.db'}"
    with live_server(url, limits=Limits(rate=1e6, longest_wait=0.01)) as running:
        yield running


def test_every_route_is_described() -> None:
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in ROUTES}
    for route in ROUTES:
        operation = DOCUMENT["paths"][route.path][route.method.lower()]
        assert operation["summary"], route.path
        assert ("security" in operation) is (route.role is not None)
        assert ("requestBody" in operation) is (route.body is not None)
    names = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_every_reference_is_there() -> None:
    text = json.dumps(DOCUMENT)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in DOCUMENT["components"]["schemas"]


@functools.cache
def schema() -> Any:
    """Imported here: schemathesis takes a second, in every process of a run."""
    import schemathesis

    return schemathesis.openapi.from_dict(DOCUMENT)


OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]


# Not `schema.parametrize`: all of its tests have one id, and a parallel run then runs only one of them.
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=[f"{method} {path}" for path, method in OPERATIONS])
@pytest.mark.parametrize("mode", ["positive", "negative"])
@hypothesis.settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    derandomize=True,
    database=None,
)
@hypothesis.given(data=strategies.data())
def test_no_request_is_a_server_error(
    server: RunningServer, path: str, method: str, mode: str, data: strategies.DataObject
) -> None:
    """`mode`: requests that match the document, or requests that do not."""
    from schemathesis.generation import GenerationMode

    operation = schema()[path][method]
    if mode == "negative" and not (operation.body or operation.query or operation.path_parameters):
        return  # it takes nothing that could be wrong
    case = data.draw(operation.as_strategy(generation_mode=GenerationMode(mode)))
    reply = case.call(base_url=server.url, timeout=60)
    assert reply.status_code < 500, (case.as_curl_command(), reply.text)
    if "json" in reply.headers.get("content-type", ""):
        reply.json()
