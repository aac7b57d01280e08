"""The tables that the workers write to: a counter for each resource, with a fence and without."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import BigInteger, Engine, String, create_engine, insert, make_url, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.guard import FencedModel
from fencelock.guard._bypass import BYPASS
from fencelock.torture.history import Row


class Base(DeclarativeBase):
    """The tables of a run."""


class Counter(FencedModel, Base):
    """How often something has been added, in a fenced table."""

    __tablename__ = "fencelock_torture_counters"
    __fence_resource__ = "{name}"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


class PlainCounter(Base):
    """The same in an ordinary table: the control."""

    __tablename__ = "fencelock_torture_plain_counters"

    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


def engine_on(url: str) -> Engine:
    """Return an engine; a worker that is paused in a transaction is waited for."""
    if make_url(url).get_backend_name() == "sqlite":
        return create_engine(url, connect_args={"timeout": 60})
    return create_engine(url)


def create_tables(engine: Engine, resources: Sequence[str]) -> None:
    """Make the tables anew, with a counter at 0 for each resource."""
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    rows = [{"name": name, "value": 0} for name in resources]
    with engine.begin() as connection:
        for model in (Counter, PlainCounter):
            connection.execute(insert(model), rows, execution_options={"fencelock": BYPASS})


def drop_tables(engine: Engine) -> None:
    """Drop them."""
    Base.metadata.drop_all(engine)


def read_rows(engine: Engine, *, guard: bool) -> list[Row]:
    """Return what is in the table that the workers wrote to."""
    with Session(engine) as session:
        if guard:
            return [
                Row(one.name, one.value, one.last_fencing_token) for one in session.scalars(select(Counter))
            ]
        return [Row(one.name, one.value, None) for one in session.scalars(select(PlainCounter))]
