"""The OpenAPI document, made from the table of routes and the types of requests and replies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.server.types import Problem

if TYPE_CHECKING:
    from millpond.server.routes import Route

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request cannot be used; the text says why.",
    "401": "No token, or an unknown one.",
    "403": "The token gives no right to this.",
    "404": "There is no such queue, message or stream.",
    "409": "The state of the messages does not allow it.",
    "413": "The request is too large.",
    "415": "The request must be application/json.",
    "429": "Too many requests; try again after Retry-After.",
    "501": "This transport lacks the capability.",
    "503": "The database or the server cannot take it now; try again after Retry-After.",
}


def document(routes: Sequence[Route]) -> bytes:
    types = [kind for route in routes for kind in (route.reply, route.body) if _is_struct(kind)]
    schemas, components = msgspec.json.schema_components([*dict.fromkeys(types), Problem], ref_template=_REF)
    reference = dict(zip([*dict.fromkeys(types), Problem], schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, reference)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Millpond",
                "version": metadata.version("millpond"),
                "description": "A durable message queue in the database you already run.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _operation(route: Route, reference: dict[Any, Any]) -> dict[str, Any]:
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": reference[Problem]}}}
        for status, text in _ERRORS.items()
    }
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [*_path_parameters(route.path), *_query_parameters(route.query)],
        "responses": {"200": {"description": "Done.", "content": _content(route, reference)}, **errors},
    }
    if route.role is not None:
        operation["security"] = [{"token": []}]
        operation["description"] = f"Needs the role `{route.role}`."
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": reference[route.body]}},
        }
    return operation


def _content(route: Route, reference: dict[Any, Any]) -> dict[str, Any]:
    if route.reply is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": reference.get(route.reply, {"type": "object"})}}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1, "maxLength": 255}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in re.findall(r"{(\w+)", path)]


def _query_parameters(query: type | None) -> list[dict[str, Any]]:
    if query is None:
        return []
    schema = msgspec.json.schema(query)
    properties: dict[str, Any] = next(iter(schema["$defs"].values()))["properties"]
    definitions = {name: value for name, value in schema["$defs"].items() if "enum" in value}
    found = []
    for name, value in properties.items():
        value.pop("default", None)
        if "$ref" in value.get("items", {}):
            value["items"] = definitions[value["items"]["$ref"].rpartition("/")[2]]
        # A parameter that is left out has no value; null cannot be written in a query.
        kinds = [kind for kind in value.get("anyOf", ()) if kind.get("type") != "null"]
        found.append({"name": name, "in": "query", "required": False, "schema": kinds[0] if len(kinds) == 1 else value})
    return found


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
