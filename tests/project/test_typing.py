"""mypy accepts good programs and finds the mistakes in bad ones; pyright 1.1.414 found errors in the same lines."""

import re
import textwrap
from pathlib import Path

import msgspec
from mypy import api

from millpond.publishing import Publish, PublishManyOptions, PublishOptions
from millpond.transports.connect_options import ConnectOptions
from millpond.transports.database.options import StoreOptions
from millpond.transports.rabbitmq.options import RabbitOptions
from millpond.transports.sharded.connect import OWN_OPTIONS
from millpond.worker import SubscriberOptions, Subscription

GOOD = """
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta

from millpond import Delivery, Handling, Millpond, Publish, PublishedId, Retry, Subscribers, connect

@dataclass
class Order:
    sku: int

pond = Millpond("sqlite:///x.db", pool_size=3, busy_timeout=timedelta(seconds=5), migrate=True)
more = Subscribers()

@pond.subscriber("orders", max_workers=4, retry=Retry(attempts=3), lease=timedelta(minutes=1))
async def ship(order: Order, delivery: Delivery) -> None:
    await invoice.publish([order.sku], delay=5, key="c-7")

@pond.subscriber("invoices", timeout=None)
def invoice(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

@pond.subscriber("mails", batch=100, gather=0.5)
async def mail(addresses: list[str]) -> None: ...

@pond.subscriber("ticks")
async def tick() -> None: ...

@more.subscriber("a", "b")
def plain(body: dict[str, int]) -> None: ...

@more.every("*/5 * * * *", queue="c", timezone="Europe/Berlin", missed="skip", max_workers=1)
def clean(body: dict[str, int]) -> None: ...

@pond.middleware
def watch(handling: Handling) -> Generator[None, BaseException | None, None]:
    error = yield
    print(handling.queue, error)

async def main() -> None:
    id_: PublishedId = await ship.publish(Order(7), delay=5, within=None)
    await ship.publish_many([Order(7), Publish(Order(8), key="c-8")], priority=10)
    await mail.publish("a@example.org")
    mail.publish_many_sync(["a@example.org"])
    once = await ship.publish(Order(9), unique="9", while_=timedelta(hours=1), on_conflict="postpone")
    result: str = once.result
    clean.publish_sync({"days": 7}, unique="clean", while_="unfinished")
    text: str = invoice([1])
    await tick()
    transport = await connect("postgresql://x", pooler=True)
    await pond.run(queues=["orders"], until_idle=True)
    async with pond.testing("sqlite:///t.db", pool_size=1) as test:
        await test.run()
        await test.assert_published("orders", Order(7), times=1)
    print(id_.new, text, result, transport.capabilities, ship.queue)
"""

BAD = """
from dataclasses import dataclass

from millpond import Millpond, Row, connect

@dataclass
class Order:
    sku: int

pond = Millpond("sqlite:///x.db", pool_sise=3)  # error: call-arg
other = Millpond("sqlite:///x.db", pool_size="3")  # error: arg-type

@pond.subscriber("orders", max_worker=4)  # error: call-overload, untyped-decorator
async def wrong(order: Order) -> None: ...

@pond.subscriber("orders")
async def ship(order: Order) -> None: ...

@pond.subscriber("mails", batch=10)
async def mail(addresses: list[str]) -> None: ...

@pond.subscriber("single", batch=10)  # error: arg-type
async def single(address: int) -> None: ...

@pond.every("* * * * *", queue="ticks", max_worker=4)  # error: call-arg
async def tick() -> None: ...

@pond.every(every=60, queue="days", missed="never")  # error: arg-type
async def day() -> None: ...

@pond.middleware  # error: type-var
def no_generator(order: Order) -> None: ...

async def main() -> None:
    await ship.publish({"sku": 7})  # error: arg-type
    await ship.publish(Order(7), unique="7", while_="forever")  # error: arg-type
    await ship.publish(Order(7), unique="7", on_conflict="ignore")  # error: arg-type
    await ship.publish(Order(7), dely=5)  # error: call-arg
    await ship.publish(Order(7), key=7)  # error: arg-type
    await mail.publish(["a@example.org"])  # error: arg-type
    ship.publish_many_sync([7])  # error: list-item
    await connect("sqlite:///x.db", pool_sise=3)  # error: call-arg
    await pond.run(until_idel=True)  # error: call-arg
    await pond.publish("orders", 1, prioritty=1)  # error: call-arg

def show(row: Row) -> None:
    print(row.archived_att)  # error: attr-defined
"""


def test_good_and_bad_programs(tmp_path: Path) -> None:
    for name, text in (("good", GOOD), ("bad", BAD)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text).lstrip())
    files = [str(tmp_path / "good.py"), str(tmp_path / "bad.py")]
    out, err, _ = api.run([*files, "--strict", "--cache-dir", str(tmp_path / "cache"), "--config-file", ""])
    found = set(re.findall(r"(\w+)\.py:(\d+): error: .*\[([\w-]+)\]", out))
    wanted = {
        ("bad", str(number), code)
        for number, line in enumerate((tmp_path / "bad.py").read_text().splitlines(), 1)
        if (marked := re.search(r"# error: (.+)", line))
        for code in marked[1].split(", ")
    }
    assert found == wanted, out + err


def test_types_name_every_option() -> None:
    known = {*StoreOptions.__struct_fields__, *RabbitOptions.__struct_fields__, *OWN_OPTIONS}
    assert set(ConnectOptions.__annotations__) == known
    assert {*SubscriberOptions.__annotations__, "queues", "handler", "batch", "own"} == {
        *Subscription.__struct_fields__
    }
    own = {field.name for field in msgspec.structs.fields(Publish)} - {"body"}
    assert own == set(PublishOptions.__annotations__) - {"within"}
    unique = {"unique", "while_", "on_conflict"}  # of one message
    assert set(PublishManyOptions.__annotations__) == own - {"id"} - unique | {"ids", "within"}
