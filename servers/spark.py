"""A private Spark from the installed pyspark package: a master with its workers, or a server for Spark Connect."""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from servers.ports import LOOPBACK, free_port
from servers.server import Server, find_program

JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for Java processes that live for seconds: quick compilation, few threads."""


class _Daemon(Server):
    """A Java process of Spark. Its package has no account, so it runs as the caller."""

    memory = "256m"
    settings: tuple[str, ...] = ()
    started: str
    """The log line that shows that it is ready."""

    def _account(self) -> str | None:
        return None

    def command(self) -> list[str]:
        find_program("java", "openjdk-17-jre-headless")
        java = " ".join((JAVA, *self.settings))
        environment = (
            f"SPARK_DAEMON_JAVA_OPTS={java}",
            f"SPARK_DAEMON_MEMORY={self.memory}",
            f"PYSPARK_PYTHON={os.environ.get('PYSPARK_PYTHON', sys.executable)}",
            f"SPARK_LOCAL_DIRS={self.folder}",
            f"SPARK_LOCAL_IP={self.host}",
        )
        return ["/usr/bin/env", *environment, str(spark_home() / "bin" / "spark-class"), *self.arguments()]

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def ready(self) -> bool:
        return self.started in self.log.read_text(errors="replace")


class SparkMaster(_Daemon):
    name = "spark-master"
    # The REST server has a fixed port, which two masters cannot share.
    settings = ("-Dspark.master.rest.enabled=false",)
    started = "I have been elected leader"

    def __init__(self) -> None:
        super().__init__()
        self._page = free_port()

    def arguments(self) -> list[str]:
        master = "org.apache.spark.deploy.master.Master"
        return [master, "--host", self.host, "--port", str(self.port), "--webui-port", str(self._page)]

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"


class SparkWorker(_Daemon):
    name = "spark-worker"
    started = "Successfully registered with master"

    def __init__(self, master: SparkMaster, *, host: str, cores: int, memory: str) -> None:
        super().__init__()
        self.host = host
        self._master = master
        self._cores = cores
        self._memory = memory
        self._page = free_port()

    def arguments(self) -> list[str]:
        return [
            *("org.apache.spark.deploy.worker.Worker", "--host", self.host, "--port", str(self.port)),
            *("--webui-port", str(self._page), "--cores", str(self._cores), "--memory", self._memory),
            *("--work-dir", str(self.folder / "work"), self._master.url),
        ]


class SparkCluster:
    """A master and workers of one core each; `kill` of a worker takes its executors too."""

    def __init__(self, workers: int = 2, *, memory: str = "1g") -> None:
        self.master = SparkMaster()
        # Different hosts: Spark runs no second copy of a task on the host of the first.
        hosts = [f"127.0.0.{n}" for n in range(1, workers + 1)]
        self.workers = [SparkWorker(self.master, host=host, cores=1, memory=memory) for host in hosts]

    @property
    def url(self) -> str:
        return self.master.url

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a test's session beside the master's URL."""
        return {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": JAVA,
            "spark.sql.shuffle.partitions": "2",
        }

    def start(self) -> Self:
        # All at once, because Java starts slowly; a worker waits for its master.
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(), (self.master, *self.workers)))
        return self

    def close(self) -> None:
        for server in (*self.workers, self.master):
            server.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class SparkConnect(_Daemon):
    """A local Spark that clients reach at `url`."""

    name = "spark-connect"
    memory = "1g"
    started = "Spark Connect server started"

    def arguments(self) -> list[str]:
        settings = {
            "spark.connect.grpc.binding.address": self.host,
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": self.host,
            "spark.driver.bindAddress": self.host,
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.ui.enabled": "false",
        }
        return [
            *("org.apache.spark.deploy.SparkSubmit", "--master", "local[2]"),
            *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
        ]

    @property
    def url(self) -> str:
        return f"sc://{self.host}:{self.port}"


def spark_home() -> Path:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
