"""The reference has every route with its role."""

from __future__ import annotations

import re
from pathlib import Path

from millpond.server.grants import Role
from millpond.server.routes import ROUTES
from millpond.server.rpc.service import ROLES

PAGE = (Path(__file__).parent.parent.parent / "docs/reference/server.md").read_text()


def test_the_table_of_routes_is_that_of_the_server() -> None:
    listed = re.findall(r"^\| `([A-Z]+ \S+)` \| `?(\w+)`? \| (.*) \|$", PAGE, re.M)
    assert listed == [(f"{r.method} {r.path}", r.role.value if r.role else "none", r.summary) for r in ROUTES]


def test_every_method_of_grpc_is_there() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \|$", PAGE, re.M)) == ROLES


def test_every_role_is_there() -> None:
    for role in Role:
        assert f"| `{role}` |" in PAGE
