"""The line that a page shows after an act: a fixed text and a number, because a link can contain it."""

from __future__ import annotations

from millpond.server.dashboard.rendering import plural

_TEXTS = {
    "retried": "{messages} published again.",
    "due": "{messages} made due now.",
    "background": "The retry of {messages} continues in the background.",
    "nothing": "Nothing was changed: the messages were claimed, settled or retried before.",
    "rescheduled": "{messages} rescheduled.",
    "replayed": "{messages} of the archive published again.",
    "replayed_before": "Nothing was published: a replay of this name has published these messages before.",
    "cancelled": "{messages} cancelled.",
    "completed": "{messages} made COMPLETED without running.",
    "interrupted": "The workers of {messages} were asked to cancel. They do so within seconds.",
    "schedule": "The schedule is changed.",
    "halted": "The schedule is paused: nothing is published until you resume it.",
    "continued": "The schedule continues, from its next time on.",
    "paused": "The queue is paused: its messages wait until you resume it.",
    "resumed": "The queue continues.",
    "purged": "{messages} deleted from the archive.",
    "released": "The stream was released, and {messages} given back.",
}


def done(what: str, number: int = 1) -> str:
    """The value of the parameter `done`."""
    return f"{what}-{number}"


def notice(text: str) -> str | None:
    """The line for a parameter `done`; None for every unknown one."""
    what, _, number = text.partition("-")
    if what not in _TEXTS or not (number.isascii() and number.isdigit() and len(number) < 12):
        return None
    return _TEXTS[what].format(messages=plural(int(number), "message"))
