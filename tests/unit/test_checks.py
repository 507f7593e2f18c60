"""Checks of options: an integer in a range, and names that do not exist."""

import pytest

from millpond.checks import integer, known_options, unknown_option
from millpond.errors import InvalidOption


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, 11])
def test_an_integer_in_its_range(value: object) -> None:
    assert integer(10, "limit", 1, 10) == 10
    with pytest.raises(InvalidOption, match="limit must be an integer from 1 to 10, not"):
        integer(value, "limit", 1, 10)


def test_a_range_without_an_upper_bound() -> None:
    assert integer(10**12, "limit") == 10**12
    with pytest.raises(InvalidOption, match="limit must be an integer of at least 0, not -1"):
        integer(-1, "limit")


def test_unknown_names() -> None:
    known_options({"schema": 1}, ["schema"])
    with pytest.raises(InvalidOption, match="unknown option 'schem'; the nearest one is 'schema'"):
        known_options({"schem": 1}, ["schema"])
    assert unknown_option("tabel", ["minPartitions", "Table"], "the source has no option") == (
        "the source has no option 'tabel'; the nearest one is 'Table'"
    )
    assert unknown_option("x", ["schema", "table"]) == "unknown option 'x'; there are schema, table"
    assert unknown_option("x", []) == "unknown option 'x'; there are none"
