"""`millpond publish`: one message, or a line each of many."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, BinaryIO

import typer

from millpond import codec
from millpond.cli import values
from millpond.cli.app import Json, Refused, command, say_json
from millpond.errors import BodyNotDecodable, BodyNotEncodable, InvalidMessage, StoreError
from millpond.message import DEFAULT_PRIORITY, Message
from millpond.transport import Transport

_BATCH = 10_000


@command("publish", lambda transport: transport)
async def publish(
    transport: Transport,
    queue: Annotated[str, typer.Argument(help="The queue's name.")],
    body: Annotated[str | None, typer.Argument(help="JSON; - reads it from stdin.", show_default=False)] = None,
    json_lines: Annotated[
        str | None, typer.Option("--json-lines", metavar="FILE", help="A message a line; - is stdin.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="The body is text as it stands, not JSON.")] = False,
    id: Annotated[str | None, typer.Option("--id", help="A UUID of yours: publishing it twice is harmless.")] = None,
    key: Annotated[str | None, typer.Option(help="Groups related messages.")] = None,
    priority: Annotated[int, typer.Option(help="0 (first) to 100 (last).")] = DEFAULT_PRIORITY,
    delay: Annotated[str | None, typer.Option(help="Not before this long from now: 30s, 15m, 12h, 7d.")] = None,
    due_at: Annotated[str | None, typer.Option(help="Not before this moment: 2030-01-31T08:00:00Z.")] = None,
    expires: Annotated[str | None, typer.Option(help="Not after this long, or this moment.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="name=value; may be given again.")] = None,
    json: Json = False,
) -> None:
    """Publish a message and print its id."""
    headers = values.headers(header or [])
    if text:
        headers.setdefault(codec.CONTENT_TYPE, codec.TEXT)
    messages = [
        Message(
            queue=queue,
            payload=payload,
            id=values.ids([id])[0] if id else None,
            key=key,
            priority=priority,
            delay=values.duration(delay, "--delay"),
            due_at=values.moment(due_at, "--due-at"),
            expires=values.duration_or_moment(expires, "--expires"),
            headers=headers,
        )
        for payload in _payloads(body, json_lines, text)
    ]
    if id and json_lines:
        raise InvalidMessage("--id is one message's; with --json-lines each line gets an id of its own")
    ids: list[str] = []
    new = 0
    for start in range(0, len(messages), _BATCH):
        try:
            published = await transport.publish(messages[start : start + _BATCH])
        except StoreError as e:
            raise Refused(f"{e} (lines 1 to {start:,} were published, the others were not)" if start else e) from e
        ids += [str(p.id) for p in published]
        new += sum(p.new for p in published)
    if json:
        say_json({"ids": ids, "new": new} if json_lines else {"id": ids[0], "new": bool(new)})
        return
    for id_ in ids:
        print(id_)
    if new < len(ids):
        print("millpond: a message with this id was published before; nothing was added", file=sys.stderr)


def _payloads(body: str | None, json_lines: str | None, text: bool) -> Iterator[bytes]:
    if json_lines is not None:
        if body is not None:
            raise InvalidMessage("give a body or --json-lines, not both")
        with nullcontext(sys.stdin.buffer) if json_lines == "-" else open(json_lines, "rb") as lines:
            yield from _lines(lines, text)
        return
    if body is None:
        raise InvalidMessage("what shall be published? Give a body, - to read it from stdin, or --json-lines FILE")
    yield _checked(sys.stdin.buffer.read() if body == "-" else _utf8(body), text, "the body")


def _lines(lines: BinaryIO, text: bool) -> Iterator[bytes]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _checked(line.rstrip(b"\r\n"), text, f"line {number}")


def _checked(payload: bytes, text: bool, what: str) -> bytes:
    try:
        codec.decode(payload, codec.TEXT if text else None)
    except BodyNotDecodable as e:
        why = str(e).removeprefix("the body is not ")
        hint = "it must be UTF-8" if text else "quote it as JSON, or send it as it stands with --text"
        raise BodyNotEncodable(f"{what} is not {why}; {hint}. Nothing was published") from None
    return payload


def _utf8(argument: str) -> bytes:
    return argument.encode(errors="surrogateescape")  # the bytes that were typed, whatever they were
