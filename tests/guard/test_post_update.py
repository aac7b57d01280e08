"""`post_update` is guarded where its foreign key is in a joined sub-table, away from the fence."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, String, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind
from tests.guard.rows import Keyed, on_sqlite_alone, rows_of, turned_away


class Base(DeclarativeBase): ...


class Team(Keyed, Base):
    __tablename__ = "pu_teams"
    members: Mapped[list[Player]] = relationship(
        foreign_keys="Player.team_id", post_update=True, back_populates=None
    )


class Person(FencedModel, Keyed, Base):
    __tablename__ = "pu_people"
    __fence_resource__ = "people"
    kind: Mapped[str] = mapped_column(String(10))
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "person"}  # noqa: RUF012


class Player(Person):
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
    Team: [{"id": 1}, {"id": 2}],
    Person: [{"id": number, "kind": "player", "last_fencing_token": 9} for number in (1, 2)],
    Player: [{"person_id": 1, "team_id": None}, {"person_id": 2, "team_id": 2}],
}


def stored(engine: Engine) -> list[tuple[int | None, ...]]:
    rows = select(Player.id, Player.team_id, Player.rival_id, Player.last_fencing_token).order_by(Player.id)
    return rows_of(engine, rows)


@on_sqlite_alone
@pytest.mark.parametrize("lease", [None, Lease("people", 5), Lease("people", 10)])
@pytest.mark.parametrize("change", ["append", "delete"])
def test_what_leaves_the_fence_alone_is_refused(
    session: Session, engine: Engine, lease: Lease | None, change: str
) -> None:
    """The other side's collection writes the sub-table only: not without a lease, and not with any."""
    before = stored(engine)
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
    assert stored(engine) == before


def test_objects_that_are_written_anyway_are_guarded(session: Session, engine: Engine) -> None:
    """Where the object itself has changed, its fence is compared in the same flush."""
    for token, refused in ((5, True), (10, False)):
        team, player, other = session.get_one(Team, 1), session.get_one(Player, 1), session.get_one(Player, 2)
        assert team.members == []
        bind(session, Lease("people", token))
        player.rival = other
        team.members.append(player)
        if refused:
            with turned_away(session, StaleTokenError):
                session.flush()
            bind(session)
        else:
            session.commit()
    assert stored(engine) == [(1, 1, 2, 10), (2, 2, None, 9)]


def test_new_and_deleted_objects_are_guarded(session: Session, engine: Engine) -> None:
    bind(session, Lease("people", 10))
    one, other = Player(id=7), Player(id=8)
    one.rival, other.rival = other, one
    session.add_all([one, other])
    session.commit()
    assert stored(engine)[2:] == [(7, None, 8, 10), (8, None, 7, 10)]
    session.delete(one)
    session.delete(other)
    session.commit()
    assert len(stored(engine)) == 2
