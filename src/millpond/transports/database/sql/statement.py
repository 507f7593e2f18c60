"""SQL texts with named parameters, rendered in the style of each driver.

A text names its parameters `:like_this`. `:*names` is a list that the database cannot take as one value; it becomes
one placeholder for each value. Values are always bound, never written into the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LONGEST_LIST = 8192
"""SQLite has 32,766 parameters to a statement unless it was built with more, and a text may name a list twice."""

_PARAMETER = re.compile(r"(?<![:\w]):(\*?)([a-z_]\w*)")


class Style(StrEnum):
    """How a driver marks a parameter."""

    DOLLAR = "$1"
    FORMAT = "%s"
    QMARK = "?"


class Statement:
    """One SQL text, rendered once per driver style and list length."""

    __slots__ = ("_names", "_numbered", "_plain", "_rendered", "lists", "text")

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        found = _PARAMETER.findall(self.text)
        self._names: list[str] = [name for _, name in found]
        self._numbered = list(dict.fromkeys(self._names))
        self.lists = sorted({name for star, name in found if star})
        self._plain: dict[Style, str] = {}
        self._rendered: dict[tuple[Any, ...], str] = {}
        """Texts by style and the lengths of their lists."""

    def render(self, style: Style, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The text and its values, in the driver's style."""
        if not self.lists:
            plain = self._plain.get(style)
            if plain is None:
                plain = self._plain[style] = self._render(style, params)
            return plain, list(map(params.__getitem__, self._numbered if style is Style.DOLLAR else self._names))
        padded = {name: _padded(params[name]) for name in self.lists}
        key = (style, *map(len, padded.values()))
        params = {**params, **padded}
        sql = self._rendered.get(key)
        if sql is None:
            sql = self._rendered[key] = self._render(style, params)
        if style is Style.DOLLAR:
            return sql, [params[name] for name in self._numbered]
        values: list[Any] = []
        for name in self._names:
            values.extend(params[name]) if name in self.lists else values.append(params[name])
        return sql, values

    def render_many(
        self, style: Style, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> tuple[str, Sequence[Sequence[Any]]]:
        """The text and the values of each row, in the driver's style."""
        sql = self._rendered.get((style,))
        if sql is None:
            sql = self._rendered[(style,)] = self._render(style, {})
        wanted = self._numbered if style is Style.DOLLAR else self._names
        if wanted == list(columns):
            return sql, rows
        places = [columns.index(name) for name in wanted]
        if len(places) == 1:
            return sql, [(row[places[0]],) for row in rows]
        return sql, list(map(itemgetter(*places), rows))

    def _render(self, style: Style, params: Mapping[str, Any]) -> str:
        numbers = {name: n for n, name in enumerate(self._numbered, 1)}

        def placeholder(match: re.Match[str]) -> str:
            star, name = match.groups()
            if style is Style.DOLLAR:
                return f"${numbers[name]}"
            return ", ".join([style.value] * len(params[name])) if star else style.value

        # In the style FORMAT, a % that marks no parameter is doubled.
        text = self.text.replace("%", "%%") if style is Style.FORMAT else self.text
        return _PARAMETER.sub(placeholder, text)

    def __repr__(self) -> str:
        return f"Statement({self.text!r})"


def _padded(values: Sequence[Any]) -> Sequence[Any]:
    """Fill a list up to a power of two with its last value: few different texts are prepared.

    Lists occur only in `IN (…)`, where a repeated value has no effect.
    """
    size = 1 << (len(values) - 1).bit_length()
    return [*values, *[values[-1]] * (size - len(values))]


class Query(msgspec.Struct, frozen=True, gc=False):
    """One statement to run; the result is its rows."""

    statement: Statement
    params: Mapping[str, Any]

    def parts(self) -> Sequence[Query] | None:
        """Several queries if a list is longer than the parameters a statement may have; None if it is one."""
        for name in self.statement.lists:
            values = self.params[name]
            if len(values) > LONGEST_LIST:
                starts = range(0, len(values), LONGEST_LIST)
                chunks = [values[start : start + LONGEST_LIST] for start in starts]
                return [Query(self.statement, {**self.params, name: chunk}) for chunk in chunks]
        return None


class Many(msgspec.Struct, frozen=True, gc=False):
    """One statement to run once for each row of values, in the driver's fastest way; no result."""

    statement: Statement
    columns: Sequence[str]
    """The parameter of each value."""
    rows: Sequence[Sequence[Any]]


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A bulk load into a table, for databases that have one besides INSERT; no result."""

    table: str
    schema: str | None
    columns: Sequence[str]
    records: Sequence[Sequence[Any]]


Step = Query | Many | Copy
Rows = Sequence[Sequence[Any]]
Steps = Generator[Step, Rows, T]
"""An operation that yields statements and knows no connection.

The same code runs on our asynchronous connections, in a thread, and on any connection of a caller.
"""


def drive(steps: Steps[T], run: Callable[[Step], Rows]) -> T:
    """Run an operation on a synchronous connection."""
    try:
        step = next(steps)
        while True:
            try:
                parts = step.parts() if type(step) is Query and step.statement.lists else None
                rows = run(step) if parts is None else [row for part in parts for row in run(part)]
            except BaseException as e:
                step = steps.throw(e)
            else:
                step = steps.send(rows)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(steps: Steps[T], run: Callable[[Step], Any]) -> T:
    """Run an operation on an asynchronous connection."""
    try:
        step = next(steps)
        while True:
            try:
                parts = step.parts() if type(step) is Query and step.statement.lists else None
                rows = await run(step) if parts is None else [row for part in parts for row in await run(part)]
            except BaseException as e:
                step = steps.throw(e)
            else:
                step = steps.send(rows)
    except StopIteration as stop:
        result: T = stop.value
        return result
