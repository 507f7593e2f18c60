"""No form of a secret appears in logs, errors or texts for people."""

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from millpond import Millpond, transports
from millpond.cli import logs, run_console
from millpond.cli.run_arguments import LogFormat, LogLevel
from millpond.cli.run_options import RunOptions
from millpond.errors import MillpondError
from millpond.transports.database.runner import translated
from millpond.transports.database.sql.dialect import ErrorKind
from millpond.transports.url import Url

DECODED, ENCODED = "p@ss/w rd", "p%40ss%2Fw%20rd"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Output of the log as `millpond run` configures it."""
    out = io.StringIO()
    monkeypatch.setattr(run_console, "_Console", lambda **_: Console(file=out, width=400))
    root, ours = logging.getLogger(), logging.getLogger("millpond")
    before = root.handlers[:], root.level, ours.level
    yield out
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


OPTIONS = RunOptions("shop", None, 1.0, LogFormat.TEXT, LogLevel.INFO, None, False)


@pytest.mark.parametrize(
    ("raw", "options", "secrets"),
    [
        (f"postgresql://shop:{ENCODED}@db/shop", {}, [DECODED, ENCODED, "p%40ss/w%20rd", "p%40ss%2Fw+rd"]),
        ("postgresql://shop@db/shop?password=hunter2222", {}, ["hunter2222"]),
        ("postgresql://shop@db/shop?sslpassword=key%2Dsecret", {}, ["key-secret", "key%2Dsecret"]),
        ("amqp://u:rabbitpw@h/v", {"archive": "postgresql://a:archivepw@db/x"}, ["rabbitpw", "archivepw"]),
    ],
)
def test_logs_hide_every_form_of_every_password(
    logged: io.StringIO, raw: str, options: dict[str, str], secrets: list[str]
) -> None:
    run_console.configure_logging(Millpond(raw, **options), OPTIONS, None)
    for secret in (raw, *options.values(), *secrets):
        logging.getLogger("handler").warning("the text %s of a handler", secret)
    shown = logged.getvalue()
    assert shown.count("of a handler") == 1 + len(options) + len(secrets)
    assert not [secret for secret in secrets if secret in shown]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("amqp://a:b@h/v and mysql://c:d@h/v", "amqp://a:***@h/v and mysql://c:***@h/v"),
        ("host=db password=x user=shop", "host=db password=*** user=shop"),
        ("password='a b' x", "password=*** x"),
        ("postgresql://u@h/d?PASSWORD=x&sslmode=require", "postgresql://u@h/d?PASSWORD=***&sslmode=require"),
        ("at 12:30 http://h:80/a@b", "at 12:30 http://h:80/a@b"),
    ],
)
def test_short_and_unknown_passwords_are_hidden_in_their_place(logged: io.StringIO, text: str, shown: str) -> None:
    logs.configure("text", "info", Console(file=logged, width=200), secrets=["b"], worker=None)
    logging.getLogger("handler").warning(text)
    assert logged.getvalue().strip().endswith(shown)


@pytest.mark.parametrize(
    "raw",
    [
        "postgresql://shop:s3cr%zzet@127.0.0.1:1/shop",
        "postgresql://shop@127.0.0.1:1/shop?password=s3cr%zzet",
        "postgresql://shop@127.0.0.1:1/shop?sslpassword=s3cr%zzet",
    ],
)
def test_errors_of_spark_connections_hide_passwords(raw: str) -> None:
    with pytest.raises(MillpondError) as raised:
        transports.open_reader(raw)
    assert "s3cr" not in str(raised.value)


def test_an_error_that_repeats_the_url_is_hidden() -> None:
    raw = "postgresql://shop:s3cr3t@db/shop"
    error = translated(Url(raw), ValueError(f"invalid dsn {raw}"), ErrorKind.OTHER)
    assert "s3cr3t" not in str(error) and "invalid dsn" in str(error)
