"""An environment shipped to the cluster as an archive, as docs/reference/spark.md describes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

import pytest

from servers import SparkCluster
from tests.spark.ponds import fill, rows

pytestmark = [pytest.mark.slow, pytest.mark.long]

PACKED = ("millpond", "pyspark_millpond", "msgspec", "uuid_utils", "asyncpg", "numpy", "numpy.libs", "pyarrow")
PACKED += ("adbc_driver_manager", "adbc_driver_postgresql", "importlib_resources", "typing_extensions.py")
JOB = """
import json, sys
import millpond.spark

master, settings, url = json.loads(sys.argv[1])
spark = millpond.spark.session("packed", master, settings)
def where(batches):
    import sys, millpond, pyarrow
    for batch in batches:
        names = [sys.prefix, millpond.__file__]
        yield pyarrow.record_batch([pyarrow.array(names)], names=["path"])
paths = [row.path for row in spark.range(0, 4, 1, 2).mapInArrow(where, "path string").collect()]
read = spark.read.format("millpond").options(url=url, table="archive", minPartitions="4").load()
found = sorted(row.id for row in read.select("id").collect())
spark.range(0, 10, 1, 2).selectExpr("cast(id as string) as payload").write.format("millpond").mode("append").options(
    url=url, queue="packed").save()
print(json.dumps([paths, found]))
spark.stop()
"""


def pack(folder: Path) -> Path:
    """A virtual environment as `python -m venv --copies` makes it, with only the packages of a task, in an archive."""
    environment = folder / "env"
    here = Path(sysconfig.get_path("purelib"))
    packages = environment / here.relative_to(sys.prefix)
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    # Not a link: Spark refuses an archive with links to places outside of it.
    shutil.copy(os.path.realpath(sys.executable), environment / "bin" / "python")
    (environment / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    source = Path(__file__).parents[2] / "src"
    for name in PACKED:
        found = source / name if (source / name).exists() else here / name
        if found.exists():
            (packages / name).symlink_to(found)
    archive = folder / "env.tar.gz"  # of a plain .tar Spark forgets the modes
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in environment.rglob("*"):
            if path.is_symlink() and path.parent == packages:
                tar.add(path.resolve(), str(path.relative_to(environment)))
            elif not path.is_dir():
                tar.add(path, str(path.relative_to(environment)))
    return archive


def test_executors_run_the_packed_environment(spark_cluster: SparkCluster, postgres_url: str, tmp_path: Path) -> None:
    fill(postgres_url)
    archive = pack(tmp_path)
    settings: dict[str, Any] = spark_cluster.settings | {"spark.archives": f"{archive}#env"}
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps([spark_cluster.url, settings, postgres_url])],
        cwd=tmp_path,  # the environment is here too: Spark plans sources in Python on the driver, by the same command
        env={**os.environ, "PYSPARK_PYTHON": "./env/bin/python", "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    paths, found = json.loads(done.stdout.splitlines()[-1])
    assert all("/work/" in path and "/env" in path for path in paths), paths
    assert found == sorted(map(str, rows(postgres_url, "archive")))
    assert len([row for row in rows(postgres_url, "messages").values() if row.queue == "packed"]) == 10
