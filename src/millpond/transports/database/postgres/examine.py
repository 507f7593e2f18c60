"""Faults that slow a queue in PostgreSQL: transactions held open, dead rows, missing partitions."""

from __future__ import annotations

from millpond.seam.diagnosis import Finding
from millpond.transports.database.postgres.partitions import missing_days
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

HELD_FOR = 60.0
"""Seconds after which an open transaction is a finding."""
_DEAD = 50_000
"""Dead rows of the messages, if they are also more than the living ones."""
# Only transactions with a snapshot or an id keep dead rows from being removed.
_HELD = """
SELECT a.pid, coalesce(nullif(a.application_name, ''), a.usename, ''), a.state,
extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM pg_stat_activity a WHERE a.xact_start < clock_timestamp() - make_interval(secs => :held_for::float8)
AND a.pid <> pg_backend_pid() AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
AND a.backend_type = 'client backend' ORDER BY a.xact_start LIMIT 5
"""
_ROWS = "SELECT s.n_dead_tup, s.n_live_tup FROM pg_stat_all_tables s WHERE s.relid = '{message}'::regclass"


def examine(d: Dialect) -> Steps[list[Finding]]:
    found = []
    for pid, name, state, seconds in (yield Query(d.sql(_HELD), {"held_for": HELD_FOR})):
        found.append(
            Finding(
                kind="held-transaction",
                severity="error",
                text=f"session {pid} ({name}, {state}) has a transaction open for {seconds:.0f} s: dead rows of the "
                "queue cannot be removed, and claims slow down",
                remedy=f"commit it, or end it with SELECT pg_terminate_backend({pid}); set "
                "idle_in_transaction_session_timeout",
            )
        )
    for dead, live in (yield Query(d.sql(_ROWS), {})):
        if dead > _DEAD and dead > live:
            found.append(
                Finding(
                    kind="dead-rows",
                    severity="warning",
                    text=f"the table of messages has about {dead:,} dead rows beside {live:,} living ones",
                    remedy="look for held transactions; check that autovacuum runs; run VACUUM on the table",
                )
            )
    missing = yield from missing_days(d, None)
    if missing:
        found.append(
            Finding(
                kind="missing-partitions",
                severity="warning",
                text=f"{len(missing)} partitions of the archive are missing for today or the days ahead: their rows go "
                "to the default partition, which no purge drops",
                remedy="run a worker or millpond purge, which make them; check the rights of their role",
            )
        )
    return found
