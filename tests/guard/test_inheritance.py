"""Rows of several tables, of models with and without a fence, are guarded where their fence is."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import BigInteger, Column, Engine, ForeignKey, Integer, String, orm, select, update
from sqlalchemy.ext.declarative import AbstractConcreteBase
from sqlalchemy.orm import Mapped, Session, mapped_column, relationship

from fencelock import FencedModel, Lease, StaleReadError, StaleTokenError, UnfencedWriteError, bind
from tests.guard.marks import InMemory, on_sqlite_alone
from tests.guard.models import Base
from tests.guard.rows import Keyed, core_table, holding, rows_of, turned_away


class Employee(Keyed, Base):
    """Not fenced, though its subclass is."""

    __tablename__ = "fs_employees"
    kind: Mapped[str]
    name: Mapped[str] = mapped_column(default="")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "employee"}  # noqa: RUF012


class Engineer(FencedModel, Employee):
    __tablename__ = "fs_engineers"
    __fence_resource__ = "engineers"
    id: Mapped[int] = mapped_column(ForeignKey("fs_employees.id"), primary_key=True)
    tool: Mapped[str] = mapped_column(default="")
    __mapper_args__ = {"polymorphic_identity": "engineer"}  # noqa: RUF012


class Team(Keyed, Base):
    __tablename__ = "pu_teams"
    members: Mapped[list[Player]] = relationship(
        foreign_keys="Player.team_id", post_update=True, back_populates=None
    )


class Person(FencedModel, Keyed, Base):
    __tablename__ = "pu_people"
    __fence_resource__ = "people"
    kind: Mapped[str]
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012


class Player(Person):
    """The foreign keys of its relationships with post_update are away from the fence."""

    __tablename__ = "pu_players"
    person_id: Mapped[int] = mapped_column(ForeignKey("pu_people.id"), primary_key=True)
    team_id: Mapped[int | None] = mapped_column(ForeignKey("pu_teams.id"))
    rival_id: Mapped[int | None] = mapped_column(ForeignKey("pu_people.id"))
    rival: Mapped[Person | None] = relationship(
        foreign_keys=rival_id, remote_side=Person.id, post_update=True
    )
    __mapper_args__ = {  # noqa: RUF012
        "polymorphic_identity": "player",
        "inherit_condition": person_id == Person.id,
    }


ROWS: dict[Any, Any] = {
    Employee: [{"id": 1, "kind": "employee"}, {"id": 2, "kind": "engineer"}],
    Engineer: {"id": 2, "last_fencing_token": 5},
    Team: [{"id": 1}, {"id": 2}],
    Person: [{"id": number, "kind": "player", "last_fencing_token": 9} for number in (1, 2)],
    Player: [{"person_id": 1, "team_id": None}, {"person_id": 2, "team_id": 2}],
}


def names(engine: Engine) -> list[str]:
    return rows_of(engine, select(Employee.name).order_by(Employee.id))


@on_sqlite_alone
@pytest.mark.parametrize("held", [(), (Lease("engineers", 7),)], ids=["no lease", "lease"])
def test_rows_of_a_plain_base_class_are_written_as_ever(engine: Engine, held: tuple[Lease, ...]) -> None:
    with holding(engine, *held) as session:
        session.add(Employee(id=3, name="new"))
        session.get_one(Employee, 1).name = "Ann"
        session.commit()
        session.delete(session.get_one(Employee, 3))
        session.commit()
    assert names(engine) == ["Ann", ""]


def test_rows_of_a_fenced_subclass_stay_guarded(engine: Engine) -> None:
    """In the part that the other table has too, and beside plain ones."""
    with Session(engine) as session:
        session.get_one(Employee, 1).name = "Ann"
        session.get_one(Employee, 2).name = "Bob"
        with turned_away(session, UnfencedWriteError, match="no lease is held"):
            session.commit()
        with pytest.raises(UnfencedWriteError, match="through their objects"):  # it does not tell whose rows
            session.execute(update(Employee).where(Employee.id == 1).values(name="Ann"))
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


def players(engine: Engine) -> list[tuple[int | None, ...]]:
    rows = select(Player.id, Player.team_id, Player.rival_id, Player.last_fencing_token).order_by(Player.id)
    return rows_of(engine, rows)


@on_sqlite_alone
@pytest.mark.parametrize("lease", [None, Lease("people", 5), Lease("people", 10)])
@pytest.mark.parametrize("change", ["append", "delete"])
def test_post_update_that_leaves_the_fence_alone_is_refused(
    session: Session, engine: Engine, lease: Lease | None, change: str
) -> None:
    """The other side's collection writes the sub-table only: not without a lease, and not with any."""
    before = players(engine)
    first, second, player = session.get_one(Team, 1), session.get_one(Team, 2), session.get_one(Player, 1)
    assert len(second.members) == 1
    if lease:
        bind(session, lease)
    if change == "append":
        first.members.append(player)
    else:
        session.delete(second)
    with turned_away(session, UnfencedWriteError, match="post_update"):
        session.flush()
    assert players(engine) == before


def test_post_update_of_objects_that_are_written_anyway_is_guarded(session: Session, engine: Engine) -> None:
    """The fence of changed, new and deleted objects is compared in the same flush."""
    for token in (5, 10):
        team, player, other = session.get_one(Team, 1), session.get_one(Player, 1), session.get_one(Player, 2)
        assert team.members == []
        bind(session, Lease("people", token))
        player.rival = other
        team.members.append(player)
        if token == 5:
            with turned_away(session, StaleTokenError):
                session.flush()
    session.commit()
    assert players(engine) == [(1, 1, 2, 10), (2, 2, None, 9)]
    one, two = Player(id=7), Player(id=8)
    one.rival, two.rival = two, one
    session.add_all([one, two])
    session.commit()
    assert players(engine)[2:] == [(7, None, 8, 10), (8, None, 7, 10)]
    session.delete(one)
    session.delete(two)
    session.commit()
    assert len(players(engine)) == 2


def new_base() -> Any:
    return orm.declarative_base()


class Column64:
    """The columns of a concrete subclass, which inherits none."""

    last_fencing_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
    last_write_id: Mapped[int] = mapped_column(BigInteger, server_default="0")


def test_concrete_inheritance_has_a_fence_in_each_table(in_memory: InMemory) -> None:
    class Order(FencedModel, new_base()):  # type: ignore[misc]
        __tablename__ = "in_orders"
        __fence_resource__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    class Gift(Column64, Order):
        __tablename__ = "in_gifts"
        __fence_resource__ = "gifts"
        id: Mapped[int] = mapped_column(primary_key=True)
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    with holding(in_memory(Order.metadata), Lease("orders", 2)) as session:
        session.add(Gift(id=1))
        with turned_away(session, UnfencedWriteError):
            session.flush()
        bind(session, Lease("gifts", 2))
        session.add(Gift(id=1))
        session.commit()
        assert session.get_one(Gift, 1).last_fencing_token == 2


def test_a_fenced_model_below_others_that_are_not(in_memory: InMemory) -> None:
    """A flush that only comes to it over a relationship, after another of its hierarchy, is guarded too."""

    class Animal(new_base()):  # type: ignore[misc]
        __tablename__ = "in_animals"
        id: Mapped[int] = mapped_column(primary_key=True)
        friend_id: Mapped[int | None] = mapped_column(ForeignKey("in_animals.id"))
        friend: Mapped[Any] = relationship("Animal", remote_side="Animal.id")
        dogs: Mapped[list[Any]] = relationship("Dog", foreign_keys="Dog.keeper_id")

    class Dog(FencedModel, Animal):
        __tablename__ = "in_dogs"
        __fence_resource__ = "dogs"
        id: Mapped[int] = mapped_column(primary_key=True)
        keeper_id: Mapped[int | None] = mapped_column(ForeignKey("in_animals.id"))
        cat_id: Mapped[int | None] = mapped_column(ForeignKey("in_cats.id"))
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    class Cat(Animal):
        __tablename__ = "in_cats"
        id: Mapped[int] = mapped_column(primary_key=True)
        dogs: Mapped[list[Any]] = relationship("Dog", foreign_keys=Dog.cat_id)
        __mapper_args__ = {"concrete": True}  # noqa: RUF012

    with holding(in_memory(Animal.metadata), Lease("dogs", 2)) as session:
        session.add_all([Animal(id=1), Dog(id=1), Cat(id=1)])
        session.commit()
        for token, keeper in enumerate((Animal, Cat), 3):
            bind(session, Lease("dogs", token))
            session.get_one(keeper, 1).dogs = [session.get_one(Dog, 1)]
            session.commit()
            assert session.get_one(Dog, 1).last_fencing_token == token


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("above", [False, True], ids=["one fenced", "all fenced"])
def test_models_below_an_abstract_concrete_base(in_memory: InMemory, *, strict: bool, above: bool) -> None:
    """A base that is only a query over its models' tables has no rows; those of the models are guarded."""

    class Plain: ...

    class Fenced(FencedModel):
        __fence_resource__ = "staff"

    class Employee(Fenced if above else Plain, AbstractConcreteBase, new_base()):  # type: ignore[misc]
        strict_attrs = strict
        name: Mapped[str]

    class Manager(Plain if above else Fenced, Employee):  # type: ignore[misc]
        __tablename__ = "in_managers"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        __mapper_args__ = {"polymorphic_identity": "manager", "concrete": True}  # noqa: RUF012

    class Engineer(Employee):
        __tablename__ = "in_engineers"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str]
        __mapper_args__ = {"polymorphic_identity": "engineer", "concrete": True}  # noqa: RUF012

    orm.configure_mappers()
    with holding(in_memory(Employee.metadata), Lease("staff", 3)) as session:
        session.add_all([Manager(id=1, name="a"), Engineer(id=2, name="b")])
        session.commit()
        for employee in session.scalars(sa.select(Employee)):
            employee.name += "z"
        session.commit()
        assert session.get_one(Manager, 1).last_fencing_token == 3
        assert session.get_one(Engineer, 2).name == "bz"
        bind(session, Lease("staff", 2))
        with pytest.raises(StaleTokenError):
            session.execute(update(Manager).values(name="c"))


def test_sub_tables_of_a_class_without_the_mixin_are_guarded(in_memory: InMemory) -> None:
    """It is guarded by its Table with a fence_column()."""
    base = new_base()
    boxes = core_table("in_boxes", Column("kind", String(9)), metadata=base.metadata, resource="boxes")
    kinds = {"polymorphic_on": boxes.c.kind, "polymorphic_identity": "box"}
    box = type("Box", (base,), {"__table__": boxes, "__mapper_args__": kinds})
    id_, width = mapped_column(ForeignKey("in_boxes.id"), primary_key=True), mapped_column(Integer, default=0)
    named = {"__tablename__": "in_crates", "__mapper_args__": {"polymorphic_identity": "crate"}}
    crate_class: Any = type("Crate", (box,), {**named, "id": id_, "width": width})
    with holding(in_memory(base.metadata), Lease("boxes", 5)) as session:
        session.add(crate_class(id=1))
        session.commit()
        crate = session.get_one(crate_class, 1)
        bind(session, Lease("boxes", 4))
        crate.width = 7
        with turned_away(session, StaleTokenError):
            session.commit()
        with pytest.raises(UnfencedWriteError):
            session.connection().execute(update(crate_class.__table__).values(width=3))
