"""SQL texts and how they reach a driver: named parameters in, the driver's own style out.

A text names its parameters `:like_this`; `:*names` stands for a list that the database cannot take as one
value and becomes as many placeholders. Values are always bound, never written into the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LONGEST_LIST = 8192
"""SQLite has 32,766 parameters to a statement unless it was built with more, and a text may name a list twice."""

_PARAMETER = re.compile(r"(?<![:\w]):(\*?)([a-z_]\w*)")


class Style(Enum):
    """How a driver marks a parameter."""

    DOLLAR = "$1"
    FORMAT = "%s"
    QMARK = "?"


class Statement:
    """One SQL text, rendered once per driver style and list length."""

    __slots__ = ("_names", "_rendered", "lists", "text")

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())
        found = _PARAMETER.findall(self.text)
        self._names: list[str] = [name for _, name in found]
        self.lists = sorted({name for star, name in found if star})
        self._rendered: dict[tuple[Style, tuple[int, ...]], str] = {}

    def render(self, style: Style, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The text and its values, in the driver's style."""
        if self.lists:
            params = {**params, **{name: _padded(params[name]) for name in self.lists}}
        key = (style, tuple(len(params[name]) for name in self.lists))
        sql = self._rendered.get(key)
        if sql is None:
            sql = self._rendered[key] = self._render(style, params)
        if style is Style.DOLLAR:
            return sql, [params[name] for name in dict.fromkeys(self._names)]
        if not self.lists:
            return sql, [params[name] for name in self._names]
        values: list[Any] = []
        for name in self._names:
            values.extend(params[name]) if name in self.lists else values.append(params[name])
        return sql, values

    def render_many(
        self, style: Style, columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> tuple[str, Sequence[Sequence[Any]]]:
        """The text and the values of each row, in the driver's style."""
        sql = self._rendered.get((style, ()))
        if sql is None:
            sql = self._rendered[style, ()] = self._render(style, {})
        wanted = list(dict.fromkeys(self._names)) if style is Style.DOLLAR else self._names
        if wanted == list(columns):
            return sql, rows
        places = [columns.index(name) for name in wanted]
        if len(places) == 1:
            return sql, [(row[places[0]],) for row in rows]
        return sql, list(map(itemgetter(*places), rows))

    def _render(self, style: Style, params: Mapping[str, Any]) -> str:
        numbers = {name: n for n, name in enumerate(dict.fromkeys(self._names), 1)}

        def placeholder(match: re.Match[str]) -> str:
            star, name = match.groups()
            if style is Style.DOLLAR:
                return f"${numbers[name]}"
            return ", ".join([style.value] * len(params[name])) if star else style.value

        # Where % marks a parameter, one that marks none is written twice.
        text = self.text.replace("%", "%%") if style is Style.FORMAT else self.text
        return _PARAMETER.sub(placeholder, text)

    def __repr__(self) -> str:
        return f"Statement({self.text!r})"


def _padded(values: Sequence[Any]) -> Sequence[Any]:
    """Filled up to a power of two with its last value, so that few texts are ever prepared.

    Only `IN (…)` takes lists, and there a repeated value means nothing.
    """
    size = 1 << (len(values) - 1).bit_length()
    return [*values, *[values[-1]] * (size - len(values))]


class Query(msgspec.Struct, frozen=True, gc=False):
    """One statement to run; the answer is its rows."""

    statement: Statement
    params: Mapping[str, Any]

    def parts(self) -> Sequence[Query]:
        """Itself, or one after the other where its list is longer than a statement may have parameters."""
        for name in self.statement.lists:
            values = self.params[name]
            if len(values) > LONGEST_LIST:
                starts = range(0, len(values), LONGEST_LIST)
                chunks = [values[start : start + LONGEST_LIST] for start in starts]
                return [Query(self.statement, {**self.params, name: chunk}) for chunk in chunks]
        return (self,)


class Many(msgspec.Struct, frozen=True, gc=False):
    """One statement to run once for each row of values, in the driver's fastest way; no answer."""

    statement: Statement
    columns: Sequence[str]
    """Which parameter each value is."""
    rows: Sequence[Sequence[Any]]


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A bulk load into a table, for databases that have one beside INSERT; no rows."""

    table: str
    schema: str | None
    columns: Sequence[str]
    records: Sequence[Sequence[Any]]


Step = Query | Many | Copy
Rows = Sequence[Sequence[Any]]
Steps = Generator[Step, Rows, T]
"""An operation that says which statements to run and knows nothing of connections.

So the same code serves our own asynchronous connections, a thread, and whatever connection a caller has.
"""


def _joined(answers: Sequence[Rows]) -> Rows:
    return answers[0] if len(answers) == 1 else [row for rows in answers for row in rows]


def drive(steps: Steps[T], run: Callable[[Step], Rows]) -> T:
    """Run an operation on a synchronous connection."""
    try:
        step = next(steps)
        while True:
            try:
                rows = run(step) if type(step) is not Query else _joined([run(part) for part in step.parts()])
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
                rows = await run(step) if type(step) is not Query else _joined([await run(p) for p in step.parts()])
            except BaseException as e:
                step = steps.throw(e)
            else:
                step = steps.send(rows)
    except StopIteration as stop:
        result: T = stop.value
        return result
