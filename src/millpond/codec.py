"""Bodies to bytes and back. JSON, text and bytes only: nothing that could run code when it is read."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.errors import BodyNotDecodable, BodyNotEncodable

CONTENT_TYPE = "content-type"
TEXT = "text/plain; charset=utf-8"
BINARY = "application/octet-stream"


def encode(body: Any) -> tuple[bytes, str | None]:
    """The bytes, and the content type when it is not JSON (which goes without saying).

    >>> encode({"sku": 7})
    (b'{"sku":7}', None)
    """
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), BINARY
    if isinstance(body, str):
        try:
            return body.encode(), TEXT
        except UnicodeEncodeError:
            raise BodyNotEncodable("the body holds half of a surrogate pair, which is not text") from None
    try:
        return msgspec.json.encode(_plain(body)), None
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotEncodable(
            f"a body of type {type(body).__name__} cannot be written as JSON: {e}; "
            "give bytes, text, or values that JSON has (dict, list, msgspec.Struct, dataclass, pydantic model)"
        ) from None


def decode(payload: bytes, content_type: str | None) -> Any:
    """The body as plain Python values."""
    if content_type == BINARY:
        return payload
    try:
        return payload.decode() if content_type == TEXT else msgspec.json.decode(payload)
    except (ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotDecodable(f"the body is not {content_type or 'JSON'}: {e}") from None


def _plain(body: Any) -> Any:
    dump = getattr(body, "model_dump", None)  # a pydantic model, without importing pydantic
    return dump(mode="json") if callable(dump) else body
