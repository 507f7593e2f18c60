"""Checks of options that several parts share: one rule and one error text each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millpond.errors import InvalidOption


def integer(value: Any, option: str, low: int = 0, high: int | None = None) -> int:
    """Return the value if it is an integer in this range. A bool is not an integer.

    >>> integer(3, "limit", 1, 10_000)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high:,}"
        raise InvalidOption(f"{option} must be an integer {bounds}, not {value!r}")
    return value


def check_clock(value: Any) -> None:
    if not callable(getattr(value, "now", None)):
        raise InvalidOption(f"clock must be a millpond.ManualClock or another object with now(), not {value!r}")


def known_options(given: Iterable[str], known: Iterable[str], what: str = "unknown option") -> None:
    """Raise `InvalidOption` for the first option that does not exist."""
    names = list(known)
    for name in given:
        if name not in names:
            raise InvalidOption(unknown_option(name, names, what))


def unknown_option(name: str, known: Iterable[str], what: str = "unknown option") -> str:
    """Error text for a name that does not exist, with the most similar one that does.

    >>> unknown_option("pool_sise", ["pool_size", "schema"])
    "unknown option 'pool_sise'; the nearest one is 'pool_size'"
    """
    import difflib  # only for an error

    spelled = {option.lower(): option for option in known}
    near = difflib.get_close_matches(name.lower(), spelled, 1)
    hint = f"the nearest one is {spelled[near[0]]!r}" if near else f"there are {', '.join(spelled.values()) or 'none'}"
    return f"{what} {name!r}; {hint}"
