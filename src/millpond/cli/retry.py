"""`millpond retry`: FAILED messages run again, RETRYABLE messages become due now."""

from typing import Annotated

import msgspec
import typer

from millpond.cli import parse
from millpond.cli.app import Declined, Json, command, print_json, print_result
from millpond.cli.arguments import SomeIds
from millpond.control import Choice, Control, Retried
from millpond.errors import InvalidMessage


@command("retry", Control, action="retry")
async def retry(
    control: Control,
    ids: SomeIds = None,
    queue: Annotated[str | None, typer.Option(help="Retry all FAILED and RETRYABLE messages of this queue.")] = None,
    reason: Annotated[
        str | None, typer.Option(help="With --queue: only messages that failed with this reason.")
    ] = None,
    error: Annotated[
        str | None, typer.Option(help="With --queue: only messages whose error or reason contains this text.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="With --queue: only messages with this key.")] = None,
    text: Annotated[str | None, typer.Option(help="With --queue: only messages whose body contains this text.")] = None,
    path: Annotated[
        str | None, typer.Option(help="With --queue: only messages with this value in the body: customer.id=7.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="With --queue: only messages archived since this time.")] = None,
    until: Annotated[str | None, typer.Option(help="With --queue: only messages archived before this time.")] = None,
    rate: Annotated[float | None, typer.Option(help="With --queue: most messages per second.")] = None,
    preview: Annotated[bool, typer.Option("--preview", help="With --queue: count the messages, retry none.")] = False,
    json: Json = False,
) -> None:
    """Publish FAILED messages again; make RETRYABLE ones due now.

    A FAILED message is published under a new id, once: repeating the command is harmless.
    """
    if ids and queue:
        raise InvalidMessage("give ids or --queue, not both")
    chosen = (error, key, text, path, since, until)
    if ids and (reason or rate or preview or any(chosen)):
        raise InvalidMessage("filters, --rate and --preview need a --queue; leave them out with ids")
    if not (ids or queue):
        raise InvalidMessage("no messages chosen: give ids, or --queue QUEUE with an optional --reason REASON")
    if queue:
        await control.check_queue(queue)
    choice = Choice(
        queue=queue,
        reason=reason,
        error=error,
        key=key,
        text=text,
        path=path,
        since=parse.parse_time(since, "--since"),
        until=parse.parse_time(until, "--until"),
    )
    if preview:
        found = await control.preview_retry(choice)
        more = "" if found.complete else " or more"
        print_result(f"{found.messages} would be retried{more}", msgspec.to_builtins(found), json)
        return
    if ids:
        result = await control.retry(parse.ids(ids))
    elif rate is None and not any(chosen):
        result = await control.retry_queue(queue or "", reason=reason)
    else:
        result = await control.retry_matching(choice, rate=rate)
    if json:
        print_json(msgspec.to_builtins(result, str_keys=True))
    else:
        _print_result(result, new_ids=bool(ids))
    if result.skipped and not (result.published or result.due_now or result.already_retried):
        raise Declined("no message was retried; the reasons are above")


def _print_result(result: Retried, *, new_ids: bool) -> None:
    if result.published or not (result.due_now or result.already_retried or result.skipped):
        print(f"{len(result.published)} published again")
    for id_ in result.published if new_ids else ():
        print(f"new id: {id_}")
    if result.due_now:
        print(f"{len(result.due_now)} due now")
    if result.already_retried:
        print(f"{len(result.already_retried)} already retried")
    for id_, why in result.skipped.items():
        print(f"{id_} skipped: {why}")
