"""Every option of a transport can be given as a text, on the command line or by an environment variable."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond import transports
from millpond.errors import InvalidOption
from millpond.transports.database.options import StoreOptions
from millpond.transports.rabbitmq.options import RabbitOptions
from servers import RabbitMQ
from tests.cli.conftest import Cli

OBJECTS = {"pool", "clock"}
"""Objects of a program, which no text can name."""


def text_for(name: str, default: Any) -> str:
    """A text for an option, other than its default where that has an obvious neighbour."""
    special = {
        "queue_type": "classic",
        "archive": "sqlite:///archive.db",
        "archive_options": "schema=x",
        "schema": "queues",
        "tls": "true",
        "migrate": "false",
    }
    if name in special:
        return special[name]
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, int | float):
        return str(default + 1)
    return "x=1" if default is None or isinstance(default, dict) else "x"


@pytest.mark.parametrize(
    ("url", "struct"),
    [("postgresql://h/d", StoreOptions), ("sqlite:///x.db", StoreOptions), ("amqp://h/v", RabbitOptions)],
)
def test_every_option_has_a_text(url: str, struct: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(struct):
        if field.name in OBJECTS:
            with pytest.raises(InvalidOption, match="cannot be given as a text"):
                transports.parse_options(url, [f"{field.name}=x"])
            continue
        text = text_for(field.name, field.default)
        try:
            parsed = transports.parse_options(url, [f"{field.name}={text}"])
        except InvalidOption as e:  # a dict: its members follow a dot
            assert f"{field.name}.NAME=VALUE" in str(e)
            parsed = transports.parse_options(url, [f"{field.name}.{text}"])
        assert list(parsed) == [field.name]
        assert parsed[field.name] != field.default, field.name


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("call_timeout", "NAME=VALUE"),
        ("call_timeot=5", "the nearest one is 'call_timeout'"),
        ("call_timeout=soon", "must be a number"),
        ("publisher_channel_pool_size=2.5", "must be a number"),
        ("archive_options=x", "archive_options.NAME=VALUE"),
        ("call_timeout.x=5", "call_timeout=VALUE"),
    ],
)
def test_wrong_texts_are_refused(cli: Cli, text: str, error: str) -> None:
    assert error in cli.fails(2, "stats", "--url", "amqp://127.0.0.1:1/v", "--option", text)


def test_options_by_argument_and_environment(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    cli.ok("migrate", url)
    cli.ok("publish", "orders", '"1234567890"', "--url", url)
    assert "body" in cli.fails(2, "publish", "orders", '"1234567890"', "--url", url, "--option", "body_limit=5")
    monkeypatch.setenv("MILLPOND_OPTIONS", "call_timeout=5 body_limit=5")
    assert "body" in cli.fails(2, "publish", "orders", '"1234567890"', "--url", url)
    monkeypatch.delenv("MILLPOND_OPTIONS")
    other = f"sqlite:///{tmp_path}/other.db"
    cli.ok("migrate", other)
    refused = cli.ok("bridge", url, other, "--queue", "orders", "--once", "--json", "--to-option", "body_limit=5")
    assert refused.json == {"moved": 0, "left": 0}


def test_classic_queues_of_a_broker(
    cli: Cli, rabbitmq_server: RabbitMQ, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_URL", rabbitmq_url)
    cli.ok("publish", "by-argument", "1", "--option", "queue_type=classic")
    monkeypatch.setenv("MILLPOND_OPTIONS", "queue_type=classic call_timeout=20")
    cli.ok("publish", "by-environment", "1")
    monkeypatch.delenv("MILLPOND_OPTIONS")
    cli.ok("publish", "by-default", "1")
    queues = rabbitmq_server.ask("GET", f"/queues/{rabbitmq_url.rpartition('/')[2]}")
    types = {queue["name"]: queue["type"] for queue in queues if queue["name"].startswith("by-")}
    assert types == {"by-argument": "classic", "by-environment": "classic", "by-default": "quorum"}
