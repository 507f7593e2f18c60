"""Ship orders: each order is shipped once, even if its message is delivered several times."""

import msgspec

from examples.orders.shop import Order, Shipment, make_tables, pond, sessions
from millpond import Delivery, RejectMessage, Retry


class ToShip(msgspec.Struct):
    order_id: int


@pond.on_start
async def prepare() -> None:
    await make_tables()


@pond.subscriber("orders", retry=Retry(initial=1, maximum=60, attempts=8))
async def ship(order: ToShip, delivery: Delivery) -> None:
    async with sessions() as session, session.begin():
        found = await session.get(Order, order.order_id)
        if found is None:
            raise RejectMessage(f"there is no order {order.order_id}")
        if found.sku == "unicorn":
            raise RuntimeError("out of stock")  # tried again later, then FAILED
        # The shipment, the ack and the next message become true in one commit.
        session.add(Shipment(order_id=found.id))
        await pond.publish("mails", {"order_id": found.id, "text": "on its way"}, within=session)
        await delivery.ack(within=session)
