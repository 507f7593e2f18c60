"""Record changes of the command line among the actions of operators."""

import getpass
import json
import sys
from typing import Any

from millpond.errors import StoreError
from millpond.seam.access import Action
from millpond.seam.transport import Capability, Transport


async def record(transport: Transport, action: str, given: dict[str, Any]) -> None:
    """Record a change that was made. A list or a preview changes nothing."""
    lists = "verb" in given and given["verb"] is None
    if lists or given.get("preview") or Capability.ACCESS not in transport.capabilities:
        return
    queue = given.get("queue")
    detail = {name: value for name, value in given.items() if name not in ("json", "queue") and value}
    made = Action(
        actor=f"{_user()} (command line)",
        action=action,
        queue=queue if isinstance(queue, str) else None,
        detail=json.dumps(detail, default=str, ensure_ascii=False),
    )
    try:
        await transport.access.record(made)
    except StoreError as e:
        print(f"millpond: done, but not recorded among the actions: {e}", file=sys.stderr)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
