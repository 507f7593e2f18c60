"""docs/reference/subscriber.md lists the options and defaults of the code."""

import inspect
import re
from pathlib import Path

import msgspec

from millpond import AckPolicy, Millpond, Retry
from millpond.worker import Subscription

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "subscriber.md").read_text()


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M)
    return str(text)


def table(title: str) -> dict[str, str]:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| .+\|$", section(title), re.M)
    return dict(rows)


def as_written(value: object) -> str:
    if isinstance(value, AckPolicy):
        return f"AckPolicy.{value.name}"
    return "Retry()" if value == Retry() else repr(value)


def test_every_subscriber_option_is_there_with_its_default() -> None:
    fields = {field.name: as_written(field.default) for field in msgspec.structs.fields(Subscription)}
    del fields["queues"], fields["handler"], fields["own"]
    assert table("Options of a subscriber") == fields


def test_every_run_option_is_there_with_its_default() -> None:
    parameters = list(inspect.signature(Millpond.run).parameters.values())[1:]
    assert table("Options of a run") == {p.name: as_written(p.default) for p in parameters}


def test_the_retry_line_is_the_signature() -> None:
    (line,) = re.findall(r"`Retry\((initial=.+?)\)`", section("Retry"))
    fields = {field.name: field.default for field in msgspec.structs.fields(Retry)}
    assert re.findall(r"(\w+)=", line) == list(fields)
    values = eval(f"dict({line})")  # noqa: S307 - our own page
    assert values == fields


def test_every_option_has_a_row_among_the_names_elsewhere() -> None:
    first = " ".join(re.findall(r"^\| ([^|]+) \|", section("Names in other systems"), re.M))
    ours = {*table("Options of a subscriber"), *table("Options of a run")}
    without_counterpart = {
        *("cancel_cut_off", "cancel_lost", "child_command", "dead_after", "end_when_stuck"),
        *("name", "signals", "until_idle"),
    }
    assert ours - without_counterpart <= set(re.findall(r"\w+", first))
