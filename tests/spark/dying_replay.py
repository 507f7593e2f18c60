"""A replay whose driver is killed when the first of its databases has published, and the others have not.

`python dying_replay.py JSON`; its process group dies with it.
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import millpond.spark
from millpond.spark import replay
from millpond.transports.database.store import DatabaseStore

publish_lots = DatabaseStore.publish_lots
first = True


async def one_and_die(self: DatabaseStore, *arguments: Any, **options: Any) -> Any:
    global first
    if not first:
        await asyncio.Event().wait()  # for ever, which is not long
    first = False
    await publish_lots(self, *arguments, **options)
    print("killed", flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    master, settings, where, name, url = json.loads(sys.argv[1])
    spark = millpond.spark.session("dying", master, settings)
    DatabaseStore.publish_lots = one_and_die  # type: ignore[method-assign, assignment]
    database = {"url": url}
    replay.replay(replay.selected(spark, where, database=database), name=name, database=database)


main()
