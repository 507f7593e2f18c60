"""TLS settings are checked, and a remote server without TLS is reported once."""

import logging
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.errors import InvalidURL
from millpond.transports import tls
from millpond.transports.database.mysql.engine import make_connector
from millpond.transports.database.options import parse, tls_context
from millpond.transports.database.postgres.engine import check_url
from millpond.transports.rabbitmq.connect import check_tls
from millpond.transports.url import Url


@pytest.fixture
def ca(tmp_path: Path) -> str:
    file = tmp_path / "ca.pem"
    file.write_text("")
    return str(file)


@pytest.mark.parametrize(
    ("value", "driver"), [("0", "0"), ("false", "0"), ("False", "0"), ("1", "1"), ("true", "1"), ("TRUE", "1")]
)
def test_no_verify_ssl_is_true_or_false(value: str, driver: str) -> None:
    assert check_tls(Url(f"amqps://u:p@h/v?heartbeat=5&no_verify_ssl={value}")).query == {
        "heartbeat": "5",
        "no_verify_ssl": driver,
    }


@pytest.mark.parametrize("value", ["", "no", "yes", "off", "2", "00"])
def test_other_values_of_no_verify_ssl_are_refused(value: str) -> None:
    with pytest.raises(InvalidURL, match=r"no_verify_ssl .* must be true or false"):
        check_tls(Url(f"amqps://h/v?no_verify_ssl={value}"))


def test_tls_parameters_without_tls_are_refused(ca: str) -> None:
    with pytest.raises(InvalidURL, match=r"cafile .* write amqps://"):
        check_tls(Url(f"amqp://h/v?cafile={ca}"))
    with pytest.raises(InvalidURL, match=r"keyfile .* needs certfile"):
        check_tls(Url(f"amqps://h/v?keyfile={ca}"))


def test_contradictions_on_mysql_are_refused(ca: str) -> None:
    with pytest.raises(InvalidURL, match="contradicts"):
        tls_context(Url(f"mysql://h/d?ssl=false&ssl_ca={ca}"), parse({}))
    with pytest.raises(InvalidURL, match="needs ssl_cert"):
        tls_context(Url(f"mysql://h/d?ssl_key={ca}"), parse({}))
    with pytest.raises(InvalidURL, match="true or false"):
        tls_context(Url("mysql://h/d?ssl=on"), parse({}))


def test_a_misspelt_sslmode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidURL, match=r"sslmode .* verify-full, not 'verify_full'"):
        check_url(Url("postgresql://h/d?sslmode=verify_full"))


def mysql(raw: str) -> None:
    make_connector(Url(raw), parse({}))


UNCHECKED = ssl.create_default_context()
UNCHECKED.check_hostname = False
UNCHECKED.verify_mode = ssl.CERT_NONE


@pytest.mark.parametrize(
    ("open_", "raw", "warned"),
    [
        (check_url, "postgresql://db.example/shop", True),
        (check_url, "postgresql:///shop?host=localhost,db.example", True),
        (check_url, "postgresql://db.example/shop?sslmode=prefer", True),
        (check_url, "postgresql://db.example/shop?sslmode=require", False),
        (check_url, "postgresql://db.example/shop?sslmode=verify-full", False),
        (check_url, "postgresql://127.0.0.1/shop", False),
        (check_url, "postgresql:///shop?host=/run/postgresql", False),
        (lambda raw: check_url(raw, True), "postgresql://db.example/shop", False),
        (lambda raw: check_url(raw, UNCHECKED), "postgresql://db.example/shop", True),
        (lambda url: mysql(url.raw), "mysql://db.example/shop", True),
        (lambda url: mysql(url.raw), "mysql://db.example/shop?ssl=true", False),
        (lambda url: mysql(url.raw), "mysql://localhost/shop", False),
        (check_tls, "amqp://mq.example/shop", True),
        (check_tls, "amqps://mq.example/shop", False),
        (check_tls, "amqps://mq.example/shop?no_verify_ssl=1", True),
        (check_tls, "amqp://[::1]/shop", False),
    ],
)
def test_a_plain_connection_to_a_remote_host_is_reported_once(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    open_: Callable[[Url], object],
    raw: str,
    warned: bool,
) -> None:
    monkeypatch.setattr(tls, "_warned", set())
    monkeypatch.delenv("PGSSLMODE", raising=False)
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(3):
            open_(Url(raw))
    assert [("not encrypted" in record.getMessage()) for record in caplog.records] == [True] * warned
