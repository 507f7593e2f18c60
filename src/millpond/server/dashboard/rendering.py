"""Templates and assets: texts are escaped, links have the prefix under which the server is mounted."""

from __future__ import annotations

import hashlib
import mimetypes
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import jinja2
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from millpond import style
from millpond.clock import SystemClock, as_datetime, span_text
from millpond.server.handlers.call import Call, not_found
from millpond.server.types import FailureReply

HOME = "/dashboard"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
NONE = "\N{EN DASH}"
"""In place of a value that there is not."""
_ASSETS = ("dashboard.css", "dashboard.js", "icon.svg")


class View(msgspec.Struct, frozen=True):
    """A page before it is made: the name of its template, and values."""

    template: str
    values: dict[str, Any]
    status: int = 200
    is_live: bool = True
    """Whether it is made again while it is open."""


class Links:
    """Links of one request."""

    def __init__(self, request: Request) -> None:
        self.root: str = request.scope.get("root_path", "").rstrip("/")

    def __call__(self, path: str = "", **query: Any) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "", [])}
        return f"{self.root}{HOME}{path}" + (f"?{urlencode(given, doseq=True)}" if given else "")

    def asset(self, name: str) -> str:
        return self(f"/assets/{name}", v=_version(name))


# --- words ------------------------------------------------------------------------------------------------


def count(number: int, approximate: bool = False) -> str:
    return f"{number:,}{'+' if approximate and number >= 1_000_000 else ''}"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(value: float) -> str:
    if 0 < value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}" if value >= 1 else f"{value:.2f}"


def duration(seconds: float | None) -> str:
    """A duration with its unit, as the report writes it."""
    if seconds is None:
        return NONE
    for below, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (120, 1, "s"), (7200, 1 / 60, "min")):
        if seconds < below:
            return f"{float(f'{seconds * factor:.3g}'):g} {unit}" if seconds else "0 s"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def moment(at: datetime | None) -> str:
    return NONE if at is None else f"{at:%Y-%m-%d %H:%M:%S}"


def now() -> datetime:
    return as_datetime(SystemClock().now())


def ago(at: datetime | None) -> str:
    if at is None:
        return NONE
    seconds = (now() - at).total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = span_text(abs(seconds))
    return f"{text} ago" if seconds > 0 else f"in {text}"


def first_line(text: str | None, most: int = 160) -> str:
    line = next(iter((text or "").strip().splitlines()), "")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def capital(text: str) -> str:
    """A text of an error or reason as the begin of a sentence."""
    return text[:1].upper() + text[1:]


def remedy(text: str) -> str:
    """A remedy as a sentence. One that begins with a command stays as it is typed."""
    return text if text.startswith("millpond ") else capital(text)


def group(failure: FailureReply) -> str:
    """A group of failures as a value of a form."""
    return msgspec.json.encode([failure.fingerprint, failure.queue, failure.messages]).decode()


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__ or "", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "count": count,
        "plural": plural,
        "rate": rate,
        "duration": duration,
        "moment": moment,
        "ago": ago,
        "capital": capital,
        "remedy": remedy,
        "first_line": first_line,
        "group": group,
        "json": lambda value: msgspec.json.encode(value, enc_hook=str).decode(errors="replace"),
    }
    return made


def render(view: View, common: dict[str, Any]) -> Response:
    text = _templates().get_template(view.template).render({**common, **view.values})
    # Half a character of a pair can stand in a message, and no page can have it.
    return Response(text.encode(errors="replace"), view.status, media_type="text/html; charset=utf-8")


# --- assets -----------------------------------------------------------------------------------------------


@cache
def _content(name: str) -> bytes:
    content = (resources.files(__package__) / "assets" / name).read_bytes()
    return style.base().encode() + content if name.endswith(".css") else content


@cache
def _version(name: str) -> str:
    return hashlib.sha256(_content(name)).hexdigest()[:16]


async def asset(call: Call) -> Response:
    """A style sheet, script or picture."""
    name = call.path["name"]
    if name not in _ASSETS:
        raise not_found(f"there is no file {name[:40]!r}")
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    response = Response(_content(name), media_type=kind)
    if call.request.query_params.get("v") == _version(name):
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
    return response
