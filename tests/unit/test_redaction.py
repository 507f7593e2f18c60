"""Passwords in texts of any program: errors of handlers, drivers and libraries."""

from __future__ import annotations

import json
import time

import pytest

from millpond.redaction import hide


@pytest.mark.parametrize(
    "text",
    [
        "amqp://u:s3cr3t@h/v",
        "redis://:s3cr3t@h",
        "https://h/x?sslpassword=s3cr3t&y=1",
        "host=h password='a\\'s3cr3t' dbname=x",
        'connect(user="u", password="a\\"s3cr3t")',
        "PGPASSWORD=s3cr3t psql",
        "MYSQL_PWD = s3cr3t",
        '{"user": "u", "password": "s3cr3t"}',
        "{'user': 'u', 'db_password': b's3cr3t'}",
        "connect(user='u', password=b's3cr3t')",
        "connect(user='u', password=Rb's3cr3t')",
        '{"user": "u", "db-password": "s3cr3t"}',
        '{"user": "u", "spring.datasource.password": "s3cr3t"}',
        "user='u' password='a\\\ns3cr3t'",
        json.dumps(json.dumps({"user": "u", "password": "s3cr3t"})),
        json.dumps(json.dumps({"user": "u", "password": 'a"s3cr3t'})),
        json.dumps(json.dumps({"user": "u", "password": "a\\s3cr3t\\"})),
        json.dumps("user='u' password=\"s3cr3t\""),
        repr("it's {'user': 'u', \"x\": 1, 'password': 's3cr3t'}"),
    ],
)
def test_a_password_is_hidden(text: str) -> None:
    hidden = hide(text)
    assert "s3cr3t" not in hidden and "***" in hidden
    assert hidden.startswith(text[:4])


@pytest.mark.parametrize("text", ["the password: it is wrong", "password", "amqp://h/v:1", "key='password'", "a == b"])
def test_other_texts_stay(text: str) -> None:
    assert hide(text) == text


def test_the_rest_of_a_text_stays() -> None:
    text = json.dumps(json.dumps({"password": 'a"s3cr3t\\', "host": "h"}))
    assert hide(text) == text[: text.index('\\"a')] + '***, \\"host\\": \\"h\\"}"'
    assert hide("f(password=b'x', host='h')") == "f(password=***, host='h')"


@pytest.mark.parametrize(
    "part",
    [
        "'password':",
        "password='",
        "password='\\",
        "a_",
        "://a:",
        'pwd="\\',
        "\\",
        '"a.',
        "'a-password",
        "password=b'",
        'password=\\"',
        '\\"password\\":\\"',
        '\\"password\\":\\"\\\\\\',
        '"password":\'\\',
        "'pwd' ",
    ],
)
def test_long_texts_take_little_time(part: str) -> None:
    """An error may quote much of a message. For quadratic time the ratio is 256"""

    def seconds(size: int) -> float:
        text = part * (size // len(part)) + "=:"
        start = time.process_time()
        assert hide(text)
        return time.process_time() - start

    seconds(1 << 16)
    assert seconds(1 << 20) < 100 * max(min(seconds(1 << 16) for _ in range(3)), 1e-4)
