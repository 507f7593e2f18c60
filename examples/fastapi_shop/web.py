"""FastAPI, async SQLAlchemy and PostgreSQL: an order and its message in one transaction, and a worker beside it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from millpond import Delivery, Millpond
from millpond.integrations.fastapi import SessionPublisher, lifespan, publisher

URL = os.environ.get("SHOP_URL", "postgresql://shop@localhost/shop")

engine = create_async_engine(URL.replace("postgresql://", "postgresql+asyncpg://"))
sessions = async_sessionmaker(engine, expire_on_commit=False)
pond = Millpond(URL)


class Base(DeclarativeBase): ...


class Order(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    shipped: Mapped[bool] = mapped_column(default=False)


class NewOrder(BaseModel):
    sku: str


@pond.subscriber("orders")
async def ship(order: dict, delivery: Delivery) -> None:
    async with sessions() as session, session.begin():
        await session.execute(update(Order).where(Order.id == order["id"]).values(shipped=True))
        await delivery.ack(within=session)  # the update and the ack happen together


async def get_session() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with lifespan(pond)(app):
        yield
    await engine.dispose()


app = FastAPI(lifespan=connected)


@app.post("/orders", status_code=201)
async def take(
    new: NewOrder,
    session: Annotated[AsyncSession, Depends(get_session)],
    messages: Annotated[SessionPublisher, publisher(pond, get_session)],
) -> int:
    order = Order(sku=new.sku)
    session.add(order)
    await session.flush()
    await messages.publish("orders", {"id": order.id})
    await session.commit()  # stores the order and its message
    return order.id


@app.get("/orders/{id_}")
async def show(id_: int, session: Annotated[AsyncSession, Depends(get_session)]) -> bool:
    order = await session.get_one(Order, id_)
    return order.shipped
