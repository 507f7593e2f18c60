"""`millpond publish`: publish one message, or one per line of a file."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated

import typer

from millpond import codec
from millpond.cli import parse
from millpond.cli.app import Declined, Json, command, print_json
from millpond.cli.arguments import Queue
from millpond.errors import BodyNotDecodable, BodyNotEncodable, InvalidMessage, StoreError
from millpond.message import DEFAULT_PRIORITY, Message, check_id
from millpond.seam.transport import Transport

_BATCH = 10_000


@command("publish", lambda transport: transport)
async def publish(
    transport: Transport,
    queue: Queue,
    body: Annotated[str | None, typer.Argument(help="JSON; - reads it from stdin.", show_default=False)] = None,
    json_lines: Annotated[
        str | None, typer.Option("--json-lines", metavar="FILE", help="File with one JSON body per line; - is stdin.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Treat the body as plain text, not JSON.")] = False,
    id: Annotated[str | None, typer.Option("--id", help="UUID of the message; the same id is published once.")] = None,
    key: Annotated[str | None, typer.Option(help="Key that groups related messages.")] = None,
    priority: Annotated[int, typer.Option(help="Priority, 0 (first) to 100 (last).")] = DEFAULT_PRIORITY,
    delay: Annotated[str | None, typer.Option(help="Time until the message is due: 30s, 15m, 12h, 7d.")] = None,
    due_at: Annotated[str | None, typer.Option(help="Time when the message is due: 2030-01-31T08:00:00Z.")] = None,
    expires: Annotated[
        str | None, typer.Option(help="Duration or time after which the message is not delivered.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="Header as name=value; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Publish a message and print its id."""
    headers = parse.headers(header or [])
    if text:
        headers.setdefault(codec.CONTENT_TYPE, codec.TEXT)
    messages = [
        Message(
            queue=queue,
            payload=payload,
            id=check_id(id) if id else None,
            key=key,
            priority=priority,
            delay=parse.duration(delay, "--delay"),
            due_at=parse.parse_time(due_at, "--due-at"),
            expires=parse.duration_or_time(expires, "--expires"),
            headers=headers,
        )
        for payload in _payloads(body, json_lines, text)
    ]
    if id and json_lines:
        raise InvalidMessage("--id is for one message; with --json-lines each line gets its own id")
    ids: list[str] = []
    new = 0
    for start in range(0, len(messages), _BATCH):
        try:
            published = await transport.publish(messages[start : start + _BATCH])
        except StoreError as e:
            raise Declined(f"{e} (lines 1 to {start:,} were published, the others were not)" if start else e) from e
        ids += [str(p.id) for p in published]
        new += sum(p.new for p in published)
    if json:
        print_json({"ids": ids, "new": new} if json_lines else {"id": ids[0], "new": bool(new)})
        return
    for id_ in ids:
        print(id_)
    if new < len(ids):
        print("millpond: a message with this id was already published; nothing was added", file=sys.stderr)


def _payloads(body: str | None, json_lines: str | None, text: bool) -> Iterator[bytes]:
    if json_lines is not None:
        if body is not None:
            raise InvalidMessage("give a body or --json-lines, not both")
        with nullcontext(sys.stdin.buffer) if json_lines == "-" else open(json_lines, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _check_body(line.rstrip(b"\r\n"), text, f"line {number}")
        return
    if body is None:
        raise InvalidMessage("no body given: pass a body, - to read it from stdin, or --json-lines FILE")
    # surrogateescape: the bytes as typed, even if they are not UTF-8
    payload = sys.stdin.buffer.read() if body == "-" else body.encode(errors="surrogateescape")
    yield _check_body(payload, text, "the body")


def _check_body(payload: bytes, text: bool, what: str) -> bytes:
    try:
        codec.decode(payload, codec.TEXT if text else None)
    except BodyNotDecodable as e:
        why = str(e).removeprefix("the body is not ")
        hint = "it must be UTF-8" if text else "quote it as JSON, or send it as plain text with --text"
        raise BodyNotEncodable(f"{what} is not {why}; {hint}. Nothing was published") from None
    return payload
