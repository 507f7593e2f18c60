"""`millpond tokens`: list, add and remove the tokens of the server."""

from enum import StrEnum
from typing import Annotated

import typer

from millpond.cli import parse
from millpond.cli.app import Declined, Json, command, print_json, print_result
from millpond.cli.table import plain, table, when
from millpond.clock import time_us
from millpond.control import Control
from millpond.errors import InvalidOption
from millpond.server.grants import Role, parse_roles
from millpond.server.tokens import new_token


class TokenVerb(StrEnum):
    ADD = "add"
    REMOVE = "remove"
    RESET = "reset"


@command("tokens", Control, action="tokens")
async def tokens(
    control: Control,
    verb: Annotated[
        TokenVerb | None,
        typer.Argument(
            show_default=False, metavar="add|remove|reset", help="add NAME, remove NAME, or reset; default: list."
        ),
    ] = None,
    name: Annotated[str | None, typer.Argument(show_default=False, help="Name of the token.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(help=f"Role of the token: {', '.join(Role)}; may be repeated.")
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option(help="Queues of the token, such as orders.*; default: all; may be repeated.")
    ] = None,
    expires: Annotated[str | None, typer.Option(metavar="MOMENT", help="End of the token; default: none.")] = None,
    json: Json = False,
) -> None:
    """List the tokens of the server, add or remove one, or forget all."""
    if verb is None:
        found = await control.access.tokens()
        if json:
            print_json(
                {
                    "tokens": [
                        {"name": t.name, "roles": t.roles, "queues": t.queues, "expires_at": when(t.expires_us)}
                        for t in found
                    ]
                }
            )
        else:
            rows = [
                [plain(t.name), ", ".join(t.roles), plain(", ".join(t.queues)), when(t.expires_us) or "never"]
                for t in found
            ]
            table(["token", "roles", "queues", "expires"], rows, right=(), empty="no tokens")
        return
    if verb is TokenVerb.RESET:
        await control.access.reset_tokens()
        print_result("forgot all tokens; a server on loopback needs none now", {"reset": True}, json)
        return
    if name is None:
        raise InvalidOption("no token named: pass its name; millpond tokens lists them")
    if verb is TokenVerb.REMOVE:
        if not await control.access.remove_token(name):
            raise Declined(f"there is no token {name!r}; millpond tokens lists them")
        print_result(f"removed {plain(name)}", {"removed": name}, json)
        return
    roles = parse_roles(role or [])
    if not roles:
        raise InvalidOption(f"a token needs a --role: {', '.join(Role)}; it may be repeated")
    end = parse.parse_time(expires, "--expires")
    text, stored = new_token(name, sorted(roles), queue or ["*"], None if end is None else time_us(end, "--expires"))
    await control.access.add_token(stored)
    print_result(f"{text}\nKeep it now: it is not stored, and cannot be shown again.", {"token": text}, json)
