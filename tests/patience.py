"""Shards that are waited for, however busy the machine is.

A claim over shards does not wait for a shard that is a quarter of a second slower than another one, so the number of
its messages depends on the machine. Tests of these limits keep them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from millpond.transports.sharded import claims, presence, workers

_LONG = 120.0


@contextlib.contextmanager
def patient_shards() -> Iterator[None]:
    """Claims, beats and chores wait for the answers of all shards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_GRACE", "_LEAST_GRACE", "_EMPTY_GRACE", "_PROMPT"):
            patch.setattr(claims, name, _LONG)
        # Without it messages of a quick shard would go back while a claim waits for a slow one.
        patch.setattr(claims.ShardedClaims, "_expire", lambda self, lane: None)
        patch.setattr(presence, "_BEAT_GRACE", _LONG)
        patch.setattr(workers, "_CHORE_GRACE", _LONG)
        yield
