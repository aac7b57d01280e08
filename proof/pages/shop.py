"""The examples of docstrings are about a small shop in `shop.db`, which grants the locks, too.

They run with all names of this module, and all public names of the library.
"""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated

import httpx
import pytest
import redis.asyncio
from celery import Celery  # type: ignore[import-untyped]
from fastapi import Depends, FastAPI
from sqlalchemy import Column, Integer, Table, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column

import fencelock
from fencelock.guard import triggers
from proof.pages import names

__all__ = [
    "Account",
    "Annotated",
    "AsyncSession",
    "Base",
    "Celery",
    "Column",
    "DeclarativeBase",
    "Depends",
    "FastAPI",
    "Integer",
    "Mapped",
    "MappedAsDataclass",
    "Order",
    "Session",
    "Table",
    "ThreadPoolExecutor",
    "app",
    "async_engine",
    "closing",
    "create_engine",
    "engine",
    "fencelock",
    "httpx",
    "jobs",
    "mapped_column",
    "pay",
    "pytest",
    "redis",
    "select",
    "sqlite3",
    "tmp_path",
    "triggers",
]


class Base(DeclarativeBase):
    """Base class of the models."""


class Order(fencelock.FencedModel, Base):
    """An order, which is paid and packed."""

    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int | None]
    status: Mapped[str]


class Account(fencelock.FencedModel, Base):
    """Money of a customer."""

    __tablename__ = "accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


fencelock.fence_table(Base.metadata)
fencelock.receipt_table(Base.metadata)
engine = create_engine("sqlite:///shop.db")
async_engine = create_async_engine("sqlite+aiosqlite:///shop.db")
fencelock.configure(engine)
Base.metadata.create_all(engine)
with Session(engine) as session, fencelock.bypass(session):
    session.add_all([Order(id=number, customer_id=1, status="new") for number in (1, 2)])
    session.add(Account(id=1, balance=0))
    session.commit()

app = FastAPI()
jobs = [1, 2, 3]
tmp_path = Path.cwd()


def pay(order_id: int, *, timeout: float = 10.0) -> None:
    """Pay an order, as the program under test does."""
    with fencelock.fenced_lock(f"order:{order_id}", timeout=timeout), Session(engine) as its:
        its.get_one(Order, order_id).status = "paid"
        its.commit()


for group in names.GROUPS:
    if group.module is not triggers:  # the examples say triggers.create
        __all__ += group.names  # noqa: PLE0605 - names of the library
        globals().update({name: getattr(group.module, name) for name in group.names})
