"""Bodies to bytes and back. JSON, text and bytes only: no format that could run code when it is read."""

from __future__ import annotations

from typing import Any

import msgspec

from millpond.errors import BodyNotDecodable, BodyNotEncodable

CONTENT_TYPE = "content-type"
TEXT = "text/plain; charset=utf-8"
BINARY = "application/octet-stream"
_CHARSETS = ("utf-8", "utf8", "us-ascii")


def encode(body: Any) -> tuple[bytes, str | None]:
    """The bytes, and the content type unless it is JSON.

    >>> encode({"sku": 7})
    (b'{"sku":7}', None)
    """
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body), BINARY
    if isinstance(body, str):
        try:
            return body.encode(), TEXT
        except UnicodeEncodeError:
            raise BodyNotEncodable("the body contains half of a surrogate pair, which is not text") from None
    try:
        return msgspec.json.encode(_plain(body), enc_hook=_plain_within), None
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotEncodable(
            f"a body of type {type(body).__name__} cannot be written as JSON: {e}; "
            "give bytes, text, or values that JSON has (dict, list, msgspec.Struct, dataclass, pydantic model)"
        ) from None


def decode(payload: bytes, content_type: str | None) -> Any:
    """The body as plain Python values."""
    if content_type == BINARY:
        return payload
    text = is_text(content_type)
    try:
        return payload.decode() if text else msgspec.json.decode(payload)
    except (ValueError, RecursionError, msgspec.MsgspecError) as e:
        raise BodyNotDecodable(f"the body is not {content_type or 'JSON'}: {e}") from None


def is_text(content_type: Any) -> bool:
    """Whether this is `text/plain`, with or without parameters. A charset other than UTF-8 is refused.

    >>> is_text("text/plain"), is_text("text/html"), is_text(None)
    (True, False, False)
    """
    if content_type == TEXT:
        return True
    if not isinstance(content_type, str):
        return False
    kind, *parameters = content_type.lower().split(";")
    if kind.strip() != "text/plain":
        return False
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip() == "charset" and charset not in _CHARSETS:
            raise BodyNotDecodable(
                f"the body is text in {charset[:40]!r}, not in UTF-8; take it as bytes and decode it"
            )
    return True


def _plain(body: Any) -> Any:
    dump = getattr(body, "model_dump", None)  # a pydantic model, without importing pydantic
    return dump(mode="json") if callable(dump) else body


def _plain_within(value: Any) -> Any:
    """A value within a body that msgspec does not know: a pydantic model in a list, dict or dataclass."""
    plain = _plain(value)
    if plain is value:
        raise TypeError(f"objects of type {type(value).__name__} are not supported")
    return plain
