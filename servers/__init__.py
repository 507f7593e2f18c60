"""Private instances of real servers, for tests, measurements and fault tests; not part of the wheel.

Each has a temporary folder, listens on a free loopback port, and ends with the process that started it. A missing
server program is an error, never a reason to skip.
"""

from servers.mariadb import MariaDB
from servers.object_store import ObjectStore
from servers.pgbouncer import PgBouncer
from servers.postgres import Postgres
from servers.proxy import Proxy
from servers.rabbitmq import RabbitMQ
from servers.server import Server, ServerError
from servers.spark import SparkCluster, SparkConnect

__all__ = [
    "MariaDB",
    "ObjectStore",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "RabbitMQ",
    "Server",
    "ServerError",
    "SparkCluster",
    "SparkConnect",
]
