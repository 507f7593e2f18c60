"""`millpond list`: live and archived messages."""

from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Json, command, print_json
from millpond.cli.arguments import QueueOrAll, States
from millpond.cli.table import plain, short, table, when
from millpond.control import Choice, Control, Page, body, facts
from millpond.message import State
from millpond.seam.operations import Row
from millpond.seam.transport import NEVER_US

EMPTY = Page(rows=[], cursor=None, read=0)


@command("list", Control)
async def list_(
    control: Control,
    queue: QueueOrAll = None,
    state: States = None,
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None,
    error: Annotated[str | None, typer.Option(help="Only messages whose error or reason contains this text.")] = None,
    text: Annotated[str | None, typer.Option(help="Only messages whose body contains this text.")] = None,
    path: Annotated[
        str | None, typer.Option(help="Only messages with this value in their body, e.g. customer.id=7.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only messages archived or published since this time.")] = None,
    until: Annotated[str | None, typer.Option(help="Only messages archived or published before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Continue behind the page that printed this cursor.")] = None,
    json: Json = False,
) -> None:
    """List live messages, then archived ones (COMPLETED, FAILED), newest first."""
    unknown = None if queue is None else await control.unknown_queue(queue)
    choice = Choice(
        queue=queue,
        states=state or [],
        key=key,
        error=error,
        text=text,
        path=path,
        since=parse.parse_time(since, "--since"),
        until=parse.parse_time(until, "--until"),
    )
    page = EMPTY if unknown else await control.search(choice, limit=limit, cursor=cursor)
    rows = page.rows
    if json:
        more = {} if page.cursor is None else {"cursor": page.cursor, "read": page.read}
        print_json({"messages": [facts(row) for row in rows], **more})
    else:
        heads = ["id", "queue", "state", "time", "deliveries", "error or body"]
        table(heads, [_entry(row) for row in rows], right=[4], empty="no messages")
        if page.cursor is not None:
            print(f"read {page.read} messages; continue with --cursor {page.cursor}")
    if unknown is not None:
        raise unknown


def _entry(row: Row) -> list[str]:
    what = ": ".join(text for text in (row.reason, row.error) if text) or short(body(row))
    at = row.archived_us or (row.lease_us if row.state is State.PROCESSING else None) or row.due_us
    kind = "archived" if row.archived_us else "leased until" if row.state is State.PROCESSING else "due"
    return [
        str(row.id),
        plain(row.queue),
        f"{row.state.value} (retried)" if row.retried else row.state.value,
        "held by a stream" if row.lease_us == NEVER_US else f"{kind} {when(at)}",
        str(row.deliveries),
        plain(what),
    ]
