"""The tables, the database and the pond of the web application and the worker."""

import os

from sqlalchemy import ForeignKey, String
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from millpond import Millpond

URL = os.environ.get("ORDERS_URL", "sqlite:///orders.db")
DRIVERS = {"sqlite://": "sqlite+aiosqlite://", "postgresql://": "postgresql+asyncpg://"}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]


class Shipment(Base):
    __tablename__ = "shipments"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), unique=True)


def make_engine(url: str) -> AsyncEngine:
    """An engine for the same database that the pond uses."""
    for scheme, driver in DRIVERS.items():
        url = url.replace(scheme, driver, 1) if url.startswith(scheme) else url
    return create_async_engine(url)


engine = make_engine(URL)
sessions = async_sessionmaker(engine, expire_on_commit=False)
pond = Millpond(URL)


async def make_tables() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
