"""Stored attempts and fingerprints are pure values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.failed_attempts import attempts, fingerprint, stored_attempt, traceback_text


@given(st.text(), st.text() | st.none(), st.floats(0, 1e6) | st.none())
def test_an_attempt_is_read_as_it_was_stored(error: str, trace: str | None, took: float | None) -> None:
    line = stored_attempt(error, trace, took)
    assert "\n" not in line
    (kept,) = attempts(f"1 2 {line}\n")
    assert (kept.claimed_us, kept.ended_us) == (1, 2)


@given(st.text())
def test_any_text_in_the_place_of_attempts_is_harmless(text: str) -> None:
    for attempt in attempts(text):
        assert attempt.claimed_us is not None


def test_failures_that_differ_in_values_are_alike() -> None:
    one = fingerprint("error", "KeyError: 'a' at 0x7f12, row 7, id 01890a5d-ac96-774b-bcce-b302099a8057")
    two = fingerprint("error", "KeyError: 'b' at 0x8f34, row 8, id 01890a5d-ac96-774b-bcce-b302099a8058")
    assert one == two != fingerprint("error", "TypeError: 'a'")
    assert 0 <= one < 2**63
    assert fingerprint(None, None) != fingerprint("expired", None)


def test_a_traceback_ends_with_the_error_and_may_be_missing() -> None:
    try:
        raise ValueError("deep") from KeyError("cause")
    except ValueError as e:
        text = traceback_text(e)
    assert text is not None and text.rstrip().endswith("ValueError: deep") and "KeyError" in text
    assert traceback_text(ValueError("never raised")) is None


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_text_has_a_traceback_or_none() -> None:
    try:
        raise Unprintable
    except Unprintable as e:
        traceback_text(e)
