"""The silence of workers is measured by the reaper's own clock: steps of the database's clock do not count."""

from millpond.clock import SECOND
from millpond.transports.database.workers.silence import Beat, Silence

HOUR = 3600.0
W = 7


class Watch:
    """Checks one worker, with a database clock that differs from ours by `offset` seconds."""

    def __init__(self) -> None:
        self.silence = Silence()
        self.offset = 1_000_000.0
        self.beat_at = 0.0
        self.number = 0

    def beat(self, now: float) -> None:
        self.number += 1
        self.beat_at = now + self.offset

    def check(self, now: float) -> float | None:
        """Seconds of silence at our time `now`; None while the last beat is fresh by the database's clock."""
        at = now + self.offset
        age = at - self.beat_at
        listed = {} if 0 <= age <= 1.0 else {W: Beat(self.number, age)}
        found = self.silence.observe(listed, round(at * SECOND), now)
        return round(found[W].seconds, 3) if W in found else None

    def seen(self, now: float) -> bool:
        at = now + self.offset
        return self.silence.observe({W: Beat(self.number, at - self.beat_at)}, round(at * SECOND), now)[W].seen


def test_a_worker_is_silent_since_its_last_beat() -> None:
    watch = Watch()
    watch.beat(10.0)
    assert [watch.check(10.2), watch.check(11.2), watch.check(12.2)] == [None, 1.2, 2.2]
    watch.beat(12.5)
    assert [watch.check(13.2), watch.check(14.2)] == [None, 1.7]


def test_at_the_first_look_a_worker_is_not_silent_yet() -> None:
    """The age of its beat may come from a step of the clock, or from an outage."""
    watch = Watch()
    watch.beat(10.0)
    assert [watch.check(100.0), watch.check(101.0)] == [0.0, 1.0]


def test_a_clock_that_is_set_forward_makes_no_worker_silent() -> None:
    watch = Watch()
    watch.beat(10.0)
    assert watch.check(10.3) is None
    watch.offset += HOUR
    assert watch.check(11.3) == 0.0
    watch.beat(11.4)
    assert watch.check(12.3) is None


def test_a_clock_that_is_set_back_hides_no_silence() -> None:
    watch = Watch()
    watch.beat(10.0)
    assert watch.check(10.3) is None
    watch.offset -= HOUR
    assert [watch.check(11.3), watch.check(12.3), watch.check(13.3)] == [0.0, 1.0, 2.0]


def test_a_step_during_a_silence_changes_nothing() -> None:
    for step in (HOUR, -HOUR):
        watch = Watch()
        watch.beat(10.0)
        assert [watch.check(10.3), watch.check(11.3)] == [None, 1.3]
        watch.offset += step
        assert watch.check(12.3) == 2.3


def test_a_beat_that_arrives_late_begins_a_new_silence() -> None:
    """It is not fresh any more when it is seen, and counts from its own time."""
    watch = Watch()
    watch.beat(10.0)
    assert [watch.check(10.3), watch.check(12.0)] == [None, 2.0]
    watch.beat(12.5)
    assert watch.check(14.0) == 1.5


def test_after_a_pause_the_observation_begins_again() -> None:
    """The database was away from this reaper, perhaps from all workers."""
    watch = Watch()
    watch.beat(10.0)
    assert [watch.check(10.3), watch.check(12.0)] == [None, 2.0]
    assert [watch.check(60.0), watch.check(61.0)] == [0.0, 1.0]


def test_restarted_by_its_reaper() -> None:
    watch = Watch()
    watch.beat(10.0)
    assert [watch.check(10.3), watch.check(12.0)] == [None, 2.0]
    watch.silence.restart()
    assert [watch.check(12.5), watch.check(13.5)] == [0.0, 1.0]


def test_a_worker_is_seen_when_it_has_beaten_since_the_observation_began() -> None:
    watch = Watch()
    watch.beat(10.0)
    assert [watch.seen(12.0), watch.seen(13.0)] == [False, False]
    watch.beat(13.5)
    assert watch.seen(14.0)
    fresh = Watch()
    fresh.beat(10.0)
    assert fresh.check(10.5) is None
    assert fresh.seen(12.0)
