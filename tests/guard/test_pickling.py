"""Pickled metadata: its tables are fenced in the process that loads them, whatever that knows of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import (
    Column,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard import FencedModel, bind, fence_column, fence_table
from fencelock.guard import _tables as tables_room
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    """Guarded row by row."""

    __tablename__ = "pk_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(20))
    value: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012


class Gift(Order):
    """Joined to it."""

    __tablename__ = "pk_gifts"
    id: Mapped[int] = mapped_column(ForeignKey("pk_orders.id"), primary_key=True)
    ribbon: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_identity": "gift"}  # noqa: RUF012


core = Table("pk_core", Base.metadata, Column("id", Integer, primary_key=True), fence_column(resource="core"))
fence_table(Base.metadata)


def test_tables_stay_fenced() -> None:
    """By their model's resource, which a copy of the metadata has no model for."""
    loaded: MetaData = pickle.loads(pickle.dumps(Base.metadata))  # noqa: S301  our own
    assert loaded.tables.keys() == Base.metadata.tables.keys()
    orders, gifts = loaded.tables["pk_orders"], loaded.tables["pk_gifts"]
    engine = create_engine("sqlite://")
    loaded.create_all(engine)
    with Session(engine) as session:
        with pytest.raises(UnfencedWriteError, match="order:1"):
            session.execute(insert(orders).values(id=1, kind="order", value=0))
        session.rollback()
        bind(session, Lease("order:1", 5), Lease("order:2", 5))
        session.execute(insert(orders).values(id=1, kind="order", value=0))
        session.commit()
        bind(session, Lease("order:1", 4))
        with pytest.raises(StaleTokenError):
            session.execute(update(orders).where(orders.c.id == 1).values(value=1))
        session.rollback()
        with pytest.raises(UnfencedWriteError, match="resource"):
            session.execute(delete(orders))
        session.rollback()
        with pytest.raises(UnfencedWriteError, match="pk_gifts"):
            session.execute(insert(gifts).values(id=1, ribbon=0))
        session.rollback()
        bind(session, Lease("order:1", 6))
        session.execute(update(orders).where(orders.c.id == 1).values(value=1))
        assert session.execute(select(orders.c.value, orders.c.last_fencing_token)).one() == (1, 6)
        session.commit()
    engine.dispose()


PROGRAM = """
import pickle, sys
from sqlalchemy import create_engine, text, update
metadata = pickle.loads(sys.stdin.buffer.read())
engine = create_engine("sqlite://")
metadata.create_all(engine)
def tries(what):
    with engine.connect() as connection:
        try:
            connection.execute(what)
        except Exception as error:
            print(type(error).__name__)
        else:
            print("written")
for name in ("pk_core", "pk_orders", "pk_gifts", "fencelock_fences"):
    tries(text(f"DELETE FROM {name}"))
tries(update(metadata.tables["pk_core"]).values(id=1))
tries(update(metadata.tables["pk_gifts"]).values(ribbon=1))
"""


def test_another_process_guards_them_as_well() -> None:
    """It has not imported anything but SQLAlchemy: what it loads does the rest, before any table is used."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=pickle.dumps(Base.metadata),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.decode().split() == ["UnfencedWriteError"] * 6


def test_a_table_that_is_still_being_loaded_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread executes statements meanwhile; what it finds harmless may turn out not to be."""
    half = Table.__new__(Table)  # as a pickle begins with it
    monkeypatch.setattr(tables_room, "_arrived", [half])
    tables_room.fenced_names()
    namesake = Table("pk_half", MetaData(), Column("id", Integer))
    tables_room.note_harmless(namesake, tables_room.harmless())
    assert not tables_room.is_harmless(namesake)


def test_text_is_looked_at_for_loaded_tables() -> None:
    """Also of those whose original is gone."""
    metadata = MetaData()
    Table("pk_gone", metadata, Column("id", Integer, primary_key=True), fence_column(resource="core"))
    stored = pickle.dumps(metadata)
    del metadata
    kept = pickle.loads(stored)  # noqa: S301  our own
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(UnfencedWriteError, match="pk_gone"):
        connection.execute(text("DELETE FROM pk_gone"))
    assert kept.tables
    engine.dispose()
