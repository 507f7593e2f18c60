"""Words for the SQL interface (`schema/*/0015_sql.sql`): its functions write the same values as the store's statements.

The texts are those of the store, with variables of a function in place of parameters. A change of one of them needs a
migration that makes the functions anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from millpond.transports.database.sql.columns import ARCHIVED, BACK_FROM_REAPER, as_archived, back_to_waiting, names


def function_texts(words: Mapping[str, str]) -> dict[str, str]:
    """In a function `at` is the time, and `v_name` the parameter `:name`."""
    words = {**words, "now": "at"}

    def text(shared: str) -> str:
        return re.sub(r"(?<![:\w]):([a-z]\w*)", r"v_\1", " ".join(shared.split())).format_map(words)

    return {
        "archived": text(names(ARCHIVED)),
        "settled": text(as_archived("g.", ran="1")),
        "unfit": text(
            as_archived(
                "g.",
                ran="0",
                state="'FAILED'",
                reason=(
                    "CASE WHEN g.expires_at <= {now} THEN 'expired' WHEN g.deliveries > v_limit "
                    "THEN 'max_deliveries' ELSE 'undecodable headers' END"
                ),
                error="",
                attempt="",
                failure="0",
            )
        ),
        "requeued": text(back_to_waiting("m.", delay="h.delay")),
        "reaped": text(BACK_FROM_REAPER),
    }
