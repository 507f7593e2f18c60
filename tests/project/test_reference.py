"""The reference matches the code: all options, errors, states, columns and commands."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

from millpond import Capability, errors
from millpond.cli.app import app
from millpond.message import State
from millpond.publishing import PublishOptions, message_of
from millpond.seam.access import Access
from millpond.seam.bulk import Bulk
from millpond.seam.diagnosis import Diagnosis
from millpond.seam.exports import Exports
from millpond.seam.operations import Operations
from millpond.seam.periodic import PeriodicMessages
from millpond.seam.streams import Streams
from millpond.seam.transactions import Transactions
from millpond.seam.workers import Workers
from millpond.transports.database.mysql import engine as mysql
from millpond.transports.database.options import StoreOptions
from millpond.transports.database.postgres import engine as postgres
from millpond.transports.rabbitmq.options import RabbitOptions

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
SCHEMA = Path(errors.__file__).parent / "transports" / "database" / "schema"


def first_cells(file: str) -> list[str]:
    """The `code` in the first column of the tables of a page."""
    return re.findall(r"^\| `([^`]+)` \|", (REFERENCE / file).read_text(), re.M)


def section(file: str, head: str) -> str:
    (found,) = re.findall(rf"^## {head}\n(.*?)(?=^## |\Z)", (REFERENCE / file).read_text(), re.S | re.M)
    return str(found)


@pytest.mark.parametrize(
    ("head", "struct"), [("Options of a store", StoreOptions), ("Options on RabbitMQ", RabbitOptions)]
)
def test_every_option_is_there_with_its_default(head: str, struct: type[msgspec.Struct]) -> None:
    options = section("options.md", head)
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", options, re.M))
    fields = {field.name: field.default for field in msgspec.structs.fields(struct)}
    assert list(rows) == list(fields), "in the order of the code"
    for name, default in fields.items():
        if name != "clock":
            said = rows[name].strip().strip("`")
            assert said == repr(default).replace("'", '"'), f"{name}: {said}"


def test_every_option_of_a_publish_is_there_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^|]+)` \|", section("options.md", "Options of a publish"), re.M))
    assert list(rows) == list(PublishOptions.__annotations__), "in the order of the code"
    parameters = inspect.signature(message_of).parameters
    defaults = {name: parameters[name].default for name in rows if name != "within"} | {"within": None}
    assert rows == {name: repr(default).replace("'", '"') for name, default in defaults.items()}


def test_every_url_parameter_is_there() -> None:
    parameters = section("options.md", "URL parameters")
    for head, known in (("PostgreSQL", postgres.URL_PARAMETERS), ("MySQL, MariaDB", mysql.URL_PARAMETERS)):
        (table,) = re.findall(rf"^\| {head} \|.*\n((?:\|.*\n)+)", parameters, re.M)
        said = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", cell)]
        assert sorted(said) == sorted(known)


def test_every_error_is_there() -> None:
    assert sorted(first_cells("errors.md")) == sorted(_public_errors())


def test_every_retryable_error_is_marked() -> None:
    text = (REFERENCE / "errors.md").read_text()
    for name, value in _public_errors().items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.M)
        assert value.retryable == row.rstrip().endswith("| yes |"), row


def _public_errors() -> dict[str, type[errors.MillpondError]]:
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"}
    return {name: value for name, value in classes.items() if issubclass(value, errors.MillpondError)}


@pytest.mark.parametrize(
    "room", [Operations, PeriodicMessages, Transactions, Workers, Diagnosis, Access, Streams, Bulk, Exports]
)
def test_every_verb_of_a_room_is_there(room: type) -> None:
    page = (REFERENCE / "transport.md").read_text()
    name = "periodic" if room is PeriodicMessages else room.__name__.lower()
    (text,) = re.findall(rf"^### `{name}`\n(.*?)(?=^##|\Z)", page, re.S | re.M)
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == [name for name in vars(room) if not name.startswith("_")]


def test_every_capability_is_there() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section("transport.md", "Capabilities"), re.M)
    assert rows == [capability.name for capability in Capability]


def test_every_state_and_column_is_there() -> None:
    cells = first_cells("states.md")
    assert {state.value for state in State} <= set(cells)
    schema = "".join(path.read_text() for path in sorted((SCHEMA / "postgresql").glob("*.sql")))
    for table in ("message", "archive"):
        (body,) = re.findall(rf"CREATE TABLE {{{table}}} \((.*?)^\)", schema, re.S | re.M)
        columns = set(re.findall(r"^  (?!PRIMARY KEY)(\w+) \w+", body, re.M))
        assert columns <= set(cells), columns - set(cells)


def _commands(prefix: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(f"{prefix}{name} ", command)
        else:
            yield f"{prefix}{name}", command


def test_every_command_and_option_is_there() -> None:
    text = (REFERENCE / "cli.md").read_text()
    commands = dict(_commands("", typer.main.get_command(app)))
    # The reader fills in words in capitals.
    described = re.findall(r"^### `millpond ([a-z-]+(?: [a-z-]+)*)", text, re.M)
    assert sorted(described) == sorted(commands)
    for name, command in commands.items():
        (section,) = re.findall(rf"^### `millpond {name}\b.*?(?=^##|\Z)", text, re.S | re.M)
        for parameter in command.params:
            for option in parameter.opts:
                common = option in ("--url", "--schema", "--table-prefix", "--option", "--json", "--help")
                hidden = getattr(parameter, "hidden", False)  # between our own processes
                if option.startswith("--") and not common and not hidden:
                    assert f"`{option}" in section, f"{name} {option}"
