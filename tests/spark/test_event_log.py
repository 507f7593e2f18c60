"""Spark's event log contains no password."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, millpond.spark
folder = sys.argv[1]
spark = millpond.spark.session("x", "local[1]", {
    "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false", "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.dir": f"file://{folder}", "spark.sql.warehouse.dir": f"{folder}/warehouse",
    "spark.executorEnv.DATABASE_URL": "postgresql://shop:hunter2222@db/shop",
    "spark.executorEnv.SHOP_SECRET_URL": "hunter3333",
})
spark.read.format("millpond").option("url", f"sqlite:///{folder}/pond.db").load().count()
spark.stop()
"""


@pytest.mark.java
def test_the_event_log_hides_urls_with_a_password(tmp_path: Path) -> None:
    migrate = [sys.executable, "-m", "millpond", "migrate", f"sqlite:///{tmp_path}/pond.db"]
    subprocess.run(migrate, check=True, capture_output=True)
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, capture_output=True)
    events = "".join(file.read_text() for file in tmp_path.iterdir() if file.name.startswith(("local-", "app-")))
    assert "SparkListenerEnvironmentUpdate" in events and "spark.executorEnv.DATABASE_URL" in events
    assert "hunter2222" not in events and "hunter3333" not in events
