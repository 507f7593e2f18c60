"""Options of Spark's reads and writes: names in any case, values as text, no secret in any error.

    options = SparkOptions(given, ("table", "columns"), of="a batch read")
    shards = options.shards()
    table = options.choice("table", ("messages", "archive"), "messages")

The options need not contain a password: `urlEnv` names the driver's environment variable that holds the URL. Without
`url` and `urlEnv` that is MILLPOND_URL.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec

from millpond import transports
from millpond.checks import integer, unknown_option
from millpond.clock import as_datetime
from millpond.errors import InvalidOption
from millpond.loop import outside_loop
from millpond.message import check_name
from millpond.seam.arrow import ArrowReader, ArrowWriter
from millpond.spark.sessions import refuse_files_on_a_cluster
from millpond.table_prefix import TABLE_PREFIX
from millpond.transports.shard_map import ShardMap, ShardRecord
from millpond.transports.url import Url

log = logging.getLogger("millpond")

URL_VARIABLE = "MILLPOND_URL"
TASK_OPTIONS = ("maxConnections", "idleTimeout")
"""Options for the connections of tasks."""
BATCH_OPTIONS = ("table", "columns", "minPartitions", "snapshot", *TASK_OPTIONS)
_EVERYWHERE = ("url", "urlEnv", "schema", "tablePrefix", "pooler")
_TRUTH = {"true": True, "false": False}
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_LONGEST = 366 * 86_400


@dataclass(frozen=True)
class SparkShard:
    """One of the databases in the option `url`, with its position there. Its repr shows no password."""

    number: int
    url: Url
    schema: str | None
    table_prefix: str
    map: ShardMap | None = None
    """The shard map of several databases; None: their order decides, as long as none of them has a map."""
    pooler: bool = False
    """True if connections pass a pooler in transaction mode."""

    @property
    def record(self) -> ShardRecord | None:
        """The shard's name and the map, by which rows are routed."""
        return None if self.map is None else ShardRecord(self.map.shards[self.number], self.map)

    @property
    def options(self) -> dict[str, Any]:
        """Options of a reader or writer."""
        return {"schema": self.schema, "table_prefix": self.table_prefix}

    @property
    def store_options(self) -> dict[str, Any]:
        """Options for `millpond.connect(shard.url.raw, **shard.store_options)`."""
        return {**self.options, "pooler": True} if self.pooler else self.options

    def open_reader(self) -> ArrowReader:
        refuse_files_on_a_cluster([self])
        return transports.open_reader(self.url.raw, **self.options)

    def open_writer(self) -> ArrowWriter:
        refuse_files_on_a_cluster([self])
        return transports.open_writer(self.url.raw, **self.options)

    def now(self) -> datetime:
        """The database's time, which decides which messages are due there."""
        with self.open_reader() as reader:
            reader.check()
            return as_datetime(reader.now())


def database_options(shards: Sequence[SparkShard]) -> dict[str, str]:
    """The options by which `format("millpond")` finds these shards."""
    given = {"url": " ".join(shard.url.raw for shard in shards), "schema": shards[0].schema}
    given |= {"tablePrefix": shards[0].table_prefix, "pooler": "true" if shards[0].pooler else None}
    return {name: value for name, value in given.items() if value is not None}


_FROM = "a stream delivers every message that waits in its queues, and remembers its place in the database"
_KAFKA = {
    **dict.fromkeys(("subscribe", "subscribepattern", "assign", "topic"), "name the queue by the option 'queue'"),
    **dict.fromkeys(("startingoffsets", "startingtimestamp", "startingoffsetsbytimestamp"), _FROM),
    **dict.fromkeys(("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"), "use .where, on created_at"),
    **dict.fromkeys(("groupidprefix", "kafka.group.id"), "name the consumer by the option 'stream'"),
    "kafka.bootstrap.servers": "name the database by the option 'url'",
}
"""Option of Kafka's source, in lower case -> its counterpart here."""


def _kafka_hint(name: str) -> str:
    return _KAFKA.get(name, "leave it out")


def _by_map(shards: Sequence[SparkShard]) -> list[SparkShard]:
    """The shards with the numbers and the key ranges of their map, if they have one."""
    urls, options = [shard.url.raw for shard in shards], shards[0].store_options
    records = outside_loop(lambda: asyncio.run(transports.shard_records(urls, **options, migrate=False)))
    if records is None:
        log.warning(
            "%d databases without a shard map: their order and number must never change. Run: millpond shards init",
            len(shards),
        )
        return list(shards)
    by_name = {record.name: shard for record, shard in zip(records, shards, strict=True)}
    map_ = records[0].map
    return [replace(by_name[name], number=n, map=map_) for n, name in enumerate(map_.shards)]


class SparkOptions:
    """The options of one read or write. An unknown name is an error: a misspelt option would have no effect."""

    def __init__(self, given: Mapping[str, str], known: Sequence[str], *, of: str) -> None:
        self._of = of
        self._given = {name.lower(): value for name, value in given.items()}
        names = {name.lower(): name for name in (*_EVERYWHERE, *known)}
        for name in self._given:
            if name in names:
                continue
            if name.startswith("kafka.") or name in _KAFKA:
                raise InvalidOption(f"{name!r} is an option of Kafka's source; {of} has none: {_kafka_hint(name)}")
            raise InvalidOption(unknown_option(name, names.values(), f"{of} has no option"))

    def get(self, name: str) -> str | None:
        return self._given.get(name.lower())

    def require(self, name: str) -> str:
        value = self.get(name)
        if not value:
            raise InvalidOption(f'{self._of} needs the option {name!r}: .option("{name}", …)')
        return value

    def either(self, name: str, alias: str) -> str:
        """The name that was given of two for the same option, the first if none was."""
        if self.get(name) is not None and self.get(alias) is not None:
            raise InvalidOption(f"{name!r} and {alias!r} are one option of {self._of}; give one of them")
        return alias if self.get(alias) is not None else name

    def choice(self, name: str, among: Sequence[str], default: str) -> str:
        value = (self.get(name) or default).lower()
        if value not in among:
            raise InvalidOption(f"the option {name!r} must be one of {', '.join(among)}, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if value.lower() not in _TRUTH:
            raise InvalidOption(f"the option {name!r} must be true or false, not {value!r}")
        return _TRUTH[value.lower()]

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name)
        if value is None:
            return default
        try:
            number: int | str = int(value)
        except ValueError:
            number = value
        return integer(number, f"the option {name!r}", low, high)

    def seconds(self, name: str, default: float) -> float:
        """A time as Spark writes it: `90s`, `15m`, `1h`, `500ms`, or a number of seconds."""
        value = self.get(name)
        if value is None:
            return default
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) *(ms|s|m|min|h|d)?", value.strip().lower())
        if found is None or not 0 < (seconds := float(found[1]) * _UNITS[found[2] or "s"]) <= _LONGEST:
            raise InvalidOption(f"the option {name!r} must be a time up to a year, like 90s, 15m or 1h, not {value!r}")
        return seconds

    def max_connections(self) -> int | None:
        """Maximum number of tasks of a read, which have a connection each; None: no bound."""
        most, shards = self.integer("maxConnections", 0, 1, 100_000), len(self.listed())
        if most and most < shards:
            raise InvalidOption(f"'maxConnections' is {most}, and the option 'url' names {shards} databases")
        return most or None

    def names(self, name: str) -> list[str]:
        """A comma-separated list of our names, such as columns, each once."""
        words = [word.strip() for word in (self.get(name) or "").split(",")]
        return [word for word in dict.fromkeys(words) if word]

    def queues(self) -> list[str]:
        """One queue by its name, several as a JSON list. Not by commas: a queue name may contain one."""
        value = self.require("queue")
        if value.startswith("["):
            try:
                queues = msgspec.json.decode(value, type=list[str])
            except msgspec.DecodeError:
                queues = []
            if not queues:
                raise InvalidOption(
                    """the option 'queue' begins with [ but is no JSON list of names, like ["a", "b"]"""
                )
        elif "," in value:
            raise InvalidOption(
                """the option 'queue' holds a comma: write several queues as ["a", "b"], and one whose name has """
                'a comma as ["a,b"]'
            )
        else:
            queues = [value]
        for queue in queues:
            check_name(queue, "queue")
        return list(dict.fromkeys(queues))

    def shards(self) -> list[SparkShard]:
        """The databases, in the order of their shard map if they have one."""
        found = self.listed()
        return _by_map(found) if len(found) > 1 else found

    def listed(self) -> list[SparkShard]:
        """The databases in the order of their URLs, which white space separates. No connection is made."""
        urls = [Url(raw) for raw in self._urls().split()]
        for url in urls:
            if not transports.is_database(url.raw):
                remedy = ". Give the database of archive= instead" if url.scheme.startswith("amqp") else ""
                raise InvalidOption(f"Spark needs a database; {url.scheme}:// is none{remedy}")
        if len({url.raw for url in urls}) < len(urls):
            raise InvalidOption("the option 'url' names one database twice")
        prefix = self.get("tablePrefix")
        prefix = TABLE_PREFIX if prefix is None else prefix
        pooler = self.flag("pooler", False)
        return [SparkShard(n, url, self.get("schema"), prefix, pooler=pooler) for n, url in enumerate(urls)]

    def _urls(self) -> str:
        given, variable = self.get("url"), self.get("urlEnv")
        if given is not None and variable is not None:
            raise InvalidOption("give either the option 'url' or 'urlEnv', not both")
        if given is None:
            given = os.environ.get(variable or URL_VARIABLE)
        if not given or not given.strip():
            what = f"the environment variable {variable} of the Spark driver is empty" if variable else "none is given"
            raise InvalidOption(
                f"{self._of} needs the URL of a database, and {what}: give the option 'url', name a variable by "
                f"'urlEnv', or set {URL_VARIABLE} before Spark starts"
            )
        return given
