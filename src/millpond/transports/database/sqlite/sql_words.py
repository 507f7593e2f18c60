"""Words for SQLite in the SQL interface: it has no function that makes bytes of numbers or of hexadecimal text."""

from __future__ import annotations

_CLOCK = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000"
_DIGITS = "'0123456789abcdef'"
_GIVEN = "lower(replace(NEW.id, '-', ''))"
_ROW = '(SELECT coalesce(max(rowid), 0) + 1 FROM "{prefix}message")'
"""Grows within a statement, so that ids sort in the order of its rows: the clock stands still there."""


def _byte(number: str) -> str:
    return f'substr((SELECT b FROM "{{prefix}}bytes"), ({number}) + 1, 1)'


def _digit(place: int) -> str:
    return f"instr({_DIGITS}, substr({_GIVEN}, {place}, 1)) - 1"


def _id(parts: list[str]) -> str:
    return f"CAST({' || '.join(parts)} AS BLOB)"


# SQLite takes any bytes for text, and a driver that decodes them fails for the whole query. One step a character: the
# number of its bytes in UTF-8, as RFC 3629 has them. Most bodies are ASCII and need no step.
_ASCII = "CAST(m.payload AS TEXT) NOT GLOB '*[^' || char(1) || '-' || char(127) || ']*'"
_LENGTHS = {
    1: ["[0-7]*"],
    2: ["C[2-9A-F][89AB]*", "D?[89AB]*"],
    3: ["E0[AB]?[89AB]*", "E[1-9ABCEF][89AB]?[89AB]*", "ED[89]?[89AB]*"],
    4: ["F0[9AB]?[89AB]?[89AB]*", "F[1-3][89AB]?[89AB]?[89AB]*", "F48?[89AB]?[89AB]*"],
}
_STEP = " ".join(
    f"WHEN h GLOB '{pattern}' THEN {length}" for length, patterns in _LENGTHS.items() for pattern in patterns
)
# By parts, because each step copies the bytes that it reads. A part ends before a character that may be cut.
_PART = f"""(WITH RECURSIVE walk (at, h, part) AS (
SELECT 1, hex(substr(m.payload, start, 4)), substr(m.payload, start, 256)
UNION ALL SELECT at + CASE {_STEP} END, hex(substr(part, at + CASE {_STEP} END, 4)), part
FROM walk WHERE h <> '' AND at <= 253)
SELECT CASE WHEN count(*) = count(at) THEN max(at) - 1 END FROM walk)"""
_UTF_8 = f"""(WITH RECURSIVE parts (start) AS (SELECT 1 UNION ALL
SELECT start + {_PART} FROM parts WHERE start <= length(m.payload))
SELECT count(*) = count(start) FROM parts)"""

_time = [_byte(f"({_CLOCK}) / 1000 >> {shift} & 255") for shift in (40, 32, 24, 16, 8, 0)]
_row = [
    _byte(f"112 | ({_ROW} >> 22 & 15)"),
    _byte(f"{_ROW} >> 14 & 255"),
    _byte(f"128 | ({_ROW} >> 8 & 63)"),
    _byte(f"{_ROW} & 255"),
]

WORDS = {
    "clock": f"({_CLOCK})",
    "all_bytes": f"x'{bytes(range(256)).hex()}'",
    "given_id": _id([_byte(f"16 * ({_digit(2 * n + 1)}) + {_digit(2 * n + 2)}") for n in range(16)]),
    # UUIDv7: milliseconds, the number of the row, random bits.
    "new_id": _id([*_time, *_row, "randomblob(6)"]),
    "text_id": "lower(substr(hex(m.id), 1, 8) || '-' || substr(hex(m.id), 9, 4) || '-' || substr(hex(m.id), 13, 4) "
    "|| '-' || substr(hex(m.id), 17, 4) || '-' || substr(hex(m.id), 21))",
    "text_body": f"CASE WHEN instr(m.payload, x'00') = 0 AND ({_ASCII} OR {_UTF_8}) THEN CAST(m.payload AS TEXT) END",
    "time_of": "strftime('%Y-%m-%d %H:%M:%f', ",
    "end_time": " / 1000000.0, 'unixepoch')",
}
