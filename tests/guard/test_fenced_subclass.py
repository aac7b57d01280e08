"""With joined inheritance, a subclass can have the fence while its base class has none."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, ForeignKey, String, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, StaleReadError, UnfencedWriteError, bind
from tests.guard.rows import Keyed, holding, on_sqlite_alone, rows_of


class Base(DeclarativeBase): ...


class Employee(Keyed, Base):
    __tablename__ = "fs_employees"
    kind: Mapped[str] = mapped_column(String(10))
    name: Mapped[str] = mapped_column(String(10), default="")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}  # noqa: RUF012


class Engineer(FencedModel, Employee):
    __tablename__ = "fs_engineers"
    __fence_resource__ = "engineers"
    id: Mapped[int] = mapped_column(ForeignKey("fs_employees.id"), primary_key=True)
    tool: Mapped[str] = mapped_column(String(10), default="")
    __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


ROWS = {
    Employee: [{"id": 1, "kind": "employee"}, {"id": 2, "kind": "engineer"}],
    Engineer: [{"id": 2, "last_fencing_token": 5}],
}


def names(engine: Engine) -> list[str]:
    return rows_of(engine, select(Employee.name).order_by(Employee.id))


@pytest.mark.parametrize("held", [(), (Lease("engineers", 7),)], ids=["no lease", "lease"])
def test_rows_of_the_plain_base_class_are_written_as_ever(engine: Engine, held: tuple[Lease, ...]) -> None:
    with Session(engine) as session:
        if held:
            bind(session, *held)
        session.add(Employee(id=3, name="new"))
        session.get_one(Employee, 1).name = "Ann"
        session.commit()
        session.delete(session.get_one(Employee, 3))
        session.commit()
    assert names(engine) == ["Ann", ""]


def test_rows_of_the_fenced_subclass_stay_guarded(engine: Engine) -> None:
    """In the part that the other table has too, and beside plain ones."""
    with Session(engine) as session:
        session.get_one(Employee, 1).name = "Ann"
        session.get_one(Employee, 2).name = "Bob"
        with pytest.raises(UnfencedWriteError, match="no lease is held"):
            session.commit()
    with holding(engine, Lease("engineers", 7)) as session:
        session.get_one(Employee, 2).name = "Bob"
        with pytest.raises(UnfencedWriteError, match="loaded without last_write_id"):
            session.commit()
    with holding(engine, Lease("engineers", 7), expire_on_commit=False) as session:
        engineer = session.get_one(Engineer, 2)
        session.commit()
        with holding(engine, Lease("engineers", 6)) as newer, newer.begin():
            newer.get_one(Engineer, 2).tool = "pen"
        engineer.name = "Bob"
        with pytest.raises(StaleReadError):
            session.commit()
    assert names(engine) == ["", ""]


@on_sqlite_alone
def test_statements_on_the_base_table_are_refused(engine: Engine) -> None:
    """They do not tell whose rows they write."""
    with Session(engine) as session, pytest.raises(UnfencedWriteError, match="through their objects"):
        session.execute(update(Employee).where(Employee.id == 1).values(name="Ann"))
