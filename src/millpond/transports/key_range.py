"""Key ranges, written as Vitess does: `-80`, `80-`, `40-80`, and `-` for all keys."""

from __future__ import annotations

import re

import msgspec

from millpond.errors import InvalidOption
from millpond.transports.routing import RING

_TEXT = re.compile(r"((?:[0-9a-f]{2}){0,8})-((?:[0-9a-f]{2}){0,8})")


class KeyRange(msgspec.Struct, frozen=True, order=True):
    """The points of the ring in [start, stop).

    >>> str(KeyRange.parse("40-80")), KeyRange.parse("80-").contains(2**63)
    ('40-80', True)
    """

    start: int
    stop: int

    @classmethod
    def parse(cls, text: object) -> KeyRange:
        match = _TEXT.fullmatch(text.lower()) if isinstance(text, str) else None
        if match is None:
            raise InvalidOption(
                f"{str(text)[:80]!r} is no key range: write pairs of hexadecimal digits around a hyphen, such as -80, "
                "40-80 or 80-"
            )
        found = cls(_point(match[1]), _point(match[2]) or RING)
        if found.start >= found.stop:
            raise InvalidOption(f"the key range {text} is empty: its start must be below its end")
        return found

    def __str__(self) -> str:
        return f"{_digits(self.start)}-{'' if self.stop == RING else _digits(self.stop)}"

    def upper(self, at: str | None = None) -> KeyRange:
        """The part from a point on; None: the upper half.

        >>> str(KeyRange.parse("-80").upper()), str(KeyRange.parse("-80").upper("20"))
        ('40-80', '20-80')
        """
        middle = self.start + (self.stop - self.start) // 2
        point = middle if at is None else KeyRange.parse(f"{at}-").start
        if not self.start < point < self.stop:
            raise InvalidOption(f"{at or 'the middle'} is not inside the key range {self}")
        return KeyRange(point, self.stop)

    def contains(self, point: int) -> bool:
        return self.start <= point < self.stop


def is_range(text: str) -> bool:
    """Whether a text is written as a key range."""
    return _TEXT.fullmatch(text.lower()) is not None


def _point(digits: str) -> int:
    return int(digits.ljust(16, "0"), 16)


def _digits(point: int) -> str:
    """The least number of pairs of digits; none for the start of the ring."""
    digits = f"{point:016x}"
    while digits.endswith("00"):
        digits = digits[:-2]
    return digits
