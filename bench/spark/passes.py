"""The number of records that Spark read from files, by its metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def records_read(spark: Any) -> Iterator[list[int]]:
    """The list receives one number at the end: the records read during the block."""
    before = _stages(spark)
    found: list[int] = []
    yield found
    found.append(sum(records for stage, records in _stages(spark).items() if stage not in before))


def _stages(spark: Any) -> dict[tuple[int, int], int]:
    context = spark.sparkContext._jsc.sc()
    context.listenerBus().waitUntilEmpty()
    store = context.statusStore()
    defaults = [getattr(store, f"stageList$default${n}")() for n in range(2, 6)]
    stages = store.stageList(None, *defaults)
    found = (stages.apply(n) for n in range(stages.size()))
    return {(stage.stageId(), stage.attemptId()): stage.inputRecords() for stage in found}
