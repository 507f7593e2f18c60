"""The handlers of `millpond demo`: a web shop that ships orders. Change them and run:

millpond run demo_shop:pond
"""

import asyncio
import random
from pathlib import Path

import msgspec

from millpond import Delivery, Millpond, RejectMessage, Retry

pond = Millpond(f"sqlite:///{Path(__file__).resolve().with_name('orders.db')}")

POSTAGE = {"AT": 6.90, "CH": 12.00, "DE": 4.90, "FR": 7.50, "IT": 8.20, "PL": 5.50}
DISCONTINUED = {"fax-machine"}


class Order(msgspec.Struct):
    number: int
    customer: str
    country: str
    sku: str
    total: float


@pond.subscriber("orders", max_workers=32, retry=Retry(initial=0.5, multiplier=2, maximum=4, jitter=0.3, attempts=4))
async def ship(order: Order, delivery: Delivery) -> None:
    if order.sku in DISCONTINUED:
        raise RejectMessage(f"{order.sku} is discontinued")  # trying again would not help
    postage = POSTAGE[order.country]
    await print_label(order, postage, attempt=delivery.claim.attempts + 1)


async def print_label(order: Order, postage: float, attempt: int) -> None:
    """Simulates the carrier's web service: takes some milliseconds, and 4 % of the calls time out."""
    luck = random.Random(10 * order.number + attempt)  # the same in every demo
    await asyncio.sleep(luck.uniform(0.002, 0.020))
    if luck.random() < 0.04:
        raise TimeoutError("the carrier does not answer")
