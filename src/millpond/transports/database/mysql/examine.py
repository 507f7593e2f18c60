"""Faults that slow a queue in MySQL and MariaDB: transactions held open, and a long history of old rows."""

from __future__ import annotations

from millpond.seam.diagnosis import Finding
from millpond.transports.database.sql.dialect import Dialect
from millpond.transports.database.sql.statement import Query, Steps

HELD_FOR = 60
"""Seconds after which an open transaction is a finding."""
_HISTORY = 200_000
_HELD = """
SELECT t.trx_mysql_thread_id, timestampdiff(SECOND, t.trx_started, now()) FROM information_schema.innodb_trx t
WHERE t.trx_started < now() - INTERVAL :held_for SECOND AND t.trx_mysql_thread_id <> connection_id()
ORDER BY t.trx_started LIMIT 5
"""
_LENGTH = "SELECT m.count FROM information_schema.innodb_metrics m WHERE m.name = 'trx_rseg_history_len'"


def examine(d: Dialect) -> Steps[list[Finding]]:
    found = []
    for thread, seconds in (yield Query(d.sql(_HELD), {"held_for": HELD_FOR})):
        found.append(
            Finding(
                kind="held-transaction",
                severity="error",
                text=f"session {thread} has a transaction open for {int(seconds)} s: old versions of the queue's rows "
                "cannot be removed, and claims slow down",
                remedy=f"commit it, or end it with KILL {thread}",
            )
        )
    for (length,) in (yield Query(d.sql(_LENGTH), {})):
        if length > _HISTORY:
            found.append(
                Finding(
                    kind="dead-rows",
                    severity="warning",
                    text=f"InnoDB keeps {length:,} old transactions (history list length)",
                    remedy="look for held transactions; they keep InnoDB from removing old rows",
                )
            )
    return found
