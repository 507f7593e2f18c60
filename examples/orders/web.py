"""Take orders: an order and its message are stored together, or not at all."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel, Field

from examples.orders.shop import Order, make_tables, pond, sessions


class NewOrder(BaseModel):
    sku: str = Field(max_length=100)
    quantity: int = Field(gt=0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await make_tables()
    async with pond:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def take(new: NewOrder) -> dict[str, object]:
    async with sessions() as session, session.begin():
        order = Order(sku=new.sku, quantity=new.quantity)
        session.add(order)
        await session.flush()  # gives the order its number
        message = await pond.publish("orders", {"order_id": order.id}, within=session)
    return {"order_id": order.id, "message": str(message)}
