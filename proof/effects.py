"""The work of `proof.receipts` and `proof.bodies`, whose effects can be counted."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import NullPool, String, create_engine, func, insert, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, fence_table, lease_table, receipt_table


class Base(DeclarativeBase):
    """The models of this proof."""


class Total(FencedModel, Base):
    """What the work adds to."""

    __tablename__ = "receipt_totals"
    __fence_resource__ = "total:{id}"
    __fence_lease__ = "optional"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int]


class Effect(Base):
    """What the work writes down: one row each time."""

    __tablename__ = "receipt_effects"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(50))


fence_table(Base.metadata)
lease_table(Base.metadata)
receipt_table(Base.metadata)


def work(session: Session, key: str) -> None:
    session.add(Effect(key=key))
    session.execute(update(Total).where(Total.id == 1).values(value=Total.value + 1))


def make_tables(url: str) -> None:
    """Make empty tables, and the total 0."""
    engine = create_engine(url, poolclass=NullPool)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Total), {"id": 1, "value": 0})
    engine.dispose()


def effects_of(url: str, runs: int) -> Counter[str]:
    """Return how many runs have had their effect once, more than once and never, and the total."""
    engine = create_engine(url, poolclass=NullPool)
    with Session(engine) as session:
        counted = select(func.count()).where(Effect.key.like("run %")).group_by(Effect.key)
        times = session.scalars(counted).all()
        total = session.get_one(Total, 1).value
    engine.dispose()
    once, more = times.count(1), len(times) - times.count(1)
    return Counter({"once": once, "more than once": more, "never": runs - len(times), "total": total})
