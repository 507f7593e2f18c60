"""Drain COUNT messages with Celery: `python rabbitmq_celery.py COUNT < url` prints one line of JSON."""

import json
import os
import sys
import threading
import time

from celery import Celery

BODY = "a" * 200
count = int(sys.argv[1])
app = Celery("bench", broker=sys.stdin.read().strip())
app.conf.update(
    task_acks_late=True,
    task_default_queue_type="quorum",  # as in the other measurements
    task_ignore_result=True,
    worker_prefetch_multiplier=100,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
    broker_transport_options={"confirm_publish": True},
)
times: list[float] = []
done = threading.Event()


@app.task
def handle(body: str) -> None:
    times.append(time.perf_counter())
    if len(times) == count:
        done.set()


for _ in range(count):
    handle.delay(BODY)
worker = app.Worker(pool="solo", loglevel="ERROR", without_gossip=True, without_mingle=True, without_heartbeat=True)
threading.Thread(target=worker.start, daemon=True).start()
done.wait()
print(json.dumps({"seconds": times[-1] - times[0]}), flush=True)
os._exit(0)  # the worker's thread does not end by itself
