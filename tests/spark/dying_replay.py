"""A replay whose driver is killed after the first of its databases has published, and before the others.

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
from millpond.transports.database.bulk import DatabaseBulk

publish = DatabaseBulk.publish
first = True


async def one_and_die(self: DatabaseBulk, *arguments: Any, **options: Any) -> Any:
    global first
    if not first:
        await asyncio.Event().wait()  # until it is killed, shortly after
    first = False
    await publish(self, *arguments, **options)
    print("killed", flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    master, settings, where, name, url = json.loads(sys.argv[1])
    spark = millpond.spark.session("dying", master, settings)
    DatabaseBulk.publish = one_and_die  # type: ignore[method-assign, assignment]
    database = {"url": url}
    replay.replay(replay.selected(spark, where, database=database), name=name, database=database)


main()
