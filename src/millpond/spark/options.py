"""Spark's options, read in one place: names in any case, values as text, and no secret in any error.

    options = Options(given, ("table", "columns"), of="a batch read")
    shards = options.shards()
    table = options.choice("table", ("messages", "archive"), "messages")

A password need not be among the options at all: `urlEnv` names the environment variable of the driver that holds
the URL, and without `url` and `urlEnv` it is MILLPOND_URL.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.errors import InvalidOption
from millpond.message import check_name
from millpond.transports.url import Url

if TYPE_CHECKING:
    from millpond.transports.database.fetch import Fetcher
    from millpond.transports.database.load import Loader

URL_VARIABLE = "MILLPOND_URL"
BATCH_OPTIONS = ("table", "columns", "minPartitions", "snapshot")
_EVERYWHERE = ("url", "urlEnv", "schema", "tablePrefix")
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Shard:
    """One of the databases that `url` names, by its place there. Its text shows no password."""

    number: int
    url: Url
    schema: str | None
    table_prefix: str

    @property
    def options(self) -> dict[str, Any]:
        """What `millpond.connect(shard.url.raw, **shard.options)` takes."""
        return {"schema": self.schema, "table_prefix": self.table_prefix}

    def fetcher(self) -> Fetcher:
        """A connection to read by, on the driver or in a task."""
        from millpond.spark.local import refuse_files_on_a_cluster
        from millpond.transports.database.fetch import open_fetcher

        refuse_files_on_a_cluster([self])
        return open_fetcher(self.url, **self.options)

    def loader(self) -> Loader:
        """A connection to stage rows by, in a task."""
        from millpond.spark.local import refuse_files_on_a_cluster
        from millpond.transports.database.load import open_loader

        refuse_files_on_a_cluster([self])
        return open_loader(self.url, **self.options)


class Options:
    """The options of one read or write. An unknown one is an error: a misspelt one would do nothing."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str], *, of: str) -> None:
        self._of = of
        self._given = {name.lower(): value for name, value in given.items()}
        names = {name.lower(): name for name in (*_EVERYWHERE, *known)}
        for name in self._given:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(names.values())}"
                raise InvalidOption(f"{of} has no option {name!r}; {hint}")

    def given(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def required(self, name: str) -> str:
        value = self.given(name)
        if not value:
            raise InvalidOption(f'{self._of} needs the option {name!r}: .option("{name}", …)')
        return value

    def either(self, name: str, alias: str) -> str:
        """Which of two names for the same thing was given, the first if none was."""
        if self.given(name) is not None and self.given(alias) is not None:
            raise InvalidOption(f"{name!r} and {alias!r} are one option of {self._of}; give one of them")
        return alias if self.given(alias) is not None else name

    def choice(self, name: str, among: Sequence[str], default: str) -> str:
        value = (self.given(name) or default).lower()
        if value not in among:
            raise InvalidOption(f"the option {name!r} must be one of {', '.join(among)}, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.given(name)
        if value is None:
            return default
        if value.lower() not in _TRUTH:
            raise InvalidOption(f"the option {name!r} must be true or false, not {value!r}")
        return _TRUTH[value.lower()]

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self.given(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise InvalidOption(f"the option {name!r} must be a whole number from {low} to {high:,}, not {value!r}")
        return number

    def names(self, name: str) -> list[str]:
        """A comma-separated list of our own words, such as columns."""
        return [word.strip() for word in (self.given(name) or "").split(",") if word.strip()]

    def queues(self, name: str = "queue") -> list[str]:
        """One queue by its name, several as a JSON list. A name may hold anything, so that a comma says nothing."""
        value = self.required(name)
        if value.startswith("["):
            try:
                queues = msgspec.json.decode(value, type=list[str])
            except msgspec.DecodeError:
                queues = []
            if not queues:
                raise InvalidOption(f'the option {name!r} begins with [ and is no JSON list of names, like ["a", "b"]')
        elif "," in value:
            raise InvalidOption(
                f'the option {name!r} holds a comma: write several queues as ["a", "b"], and one whose name has '
                'a comma as ["a,b"]'
            )
        else:
            queues = [value]
        for queue in queues:
            check_name(queue, "queue")
        return list(dict.fromkeys(queues))

    def shards(self) -> list[Shard]:
        """The databases: URLs separated by white space, in an order that must stay."""
        urls = [Url(raw) for raw in self._urls().split()]
        for url in urls:
            if url.scheme in ("memory", "amqp", "amqps"):
                raise InvalidOption(f"Spark works with databases; {url.scheme}:// is none")
        if len({url.raw for url in urls}) < len(urls):
            raise InvalidOption("the option 'url' names one database twice")
        prefix = self.given("tablePrefix") or ""
        return [Shard(n, url, self.given("schema"), prefix) for n, url in enumerate(urls)]

    def _urls(self) -> str:
        given, variable = self.given("url"), self.given("urlEnv")
        if given is not None and variable is not None:
            raise InvalidOption("give either the option 'url' or 'urlEnv', not both")
        if given is None:
            given = os.environ.get(variable or URL_VARIABLE)
        if not given or not given.strip():
            what = f"the environment variable {variable} of the Spark driver is empty" if variable else "none is there"
            raise InvalidOption(
                f"{self._of} needs the URL of a database, and {what}: give the option 'url', name a variable by "
                f"'urlEnv', or set {URL_VARIABLE} before Spark starts"
            )
        return given
