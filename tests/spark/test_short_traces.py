"""Errors that Spark prints have a short trace."""

from __future__ import annotations

import traceback

import pytest

from millpond.errors import InvalidOption
from millpond.spark.short_traces import short_trace


class Reader:
    @short_trace
    def partitions(self) -> None:
        _deep(40)

    @short_trace
    def breaks(self) -> None:
        _deep(5, ZeroDivisionError)


def _deep(depth: int, error: type[Exception] = InvalidOption) -> None:
    if depth:
        _deep(depth - 1, error)
    try:
        raise KeyError("the cause")
    except KeyError as e:
        raise error("give the option 'queue'") from e


def test_an_error_of_ours_is_a_few_lines() -> None:
    with pytest.raises(InvalidOption) as caught:
        Reader().partitions()
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 8 and lines[-1].endswith("give the option 'queue'")


def test_another_error_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        Reader().breaks()
    assert "the cause" in "".join(traceback.format_exception(caught.value))
