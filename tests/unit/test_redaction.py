"""Passwords in texts of any program: errors of handlers, drivers and libraries."""

from __future__ import annotations

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
    ],
)
def test_a_password_is_hidden(text: str) -> None:
    hidden = hide(text)
    assert "s3cr3t" not in hidden and "***" in hidden
    assert hidden.startswith(text[:4])


@pytest.mark.parametrize("text", ["the password: it is wrong", "password", "amqp://h/v:1", "key='password'", "a == b"])
def test_other_texts_stay(text: str) -> None:
    assert hide(text) == text


@pytest.mark.parametrize("part", ["'password':", "password='", "password='\\", "a_", "://a:", 'pwd="\\'])
def test_long_texts_take_little_time(part: str) -> None:
    """An error may quote 8 KiB of a message; quadratic time for this text would be minutes"""
    assert hide(part * 50_000 + "=:")
