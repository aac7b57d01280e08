"""Claims and gates send a fixed number of statements, and a claimed object shows the present row."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, select, update
from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, with_loader_criteria

import fencelock
from fencelock import Lease, StaleTokenError, bind, claim, claim_all
from tests.guard import claims
from tests.guard.claims import MODELS, NEW, OLD, Account, Cat, Eager, Note, Seat, Task
from tests.guard.listening import statements, words
from tests.guard.rows import ForAsyncio, awaiting, bypassed, holding, turned_away

ONE, TWO = ["UPDATE"], ["UPDATE", "SELECT"]
ROWS, HELD = claims.ROWS, claims.leases(NEW)


def at_once(engine: Engine, model: type[Any] = Account) -> list[str]:
    shows_all = engine.dialect.name in {"postgresql", "sqlite"}
    return ONE if shows_all and model not in (Eager, claims.Computed, Cat) else TWO


@pytest.mark.parametrize("model", MODELS)
def test_claim_sends_one_statement_where_it_is_sound(
    engine: Engine, session: Session, model: type[Any]
) -> None:
    """The claim runs twice, because the first use of a model makes its statement.

    A claimed row can be written.
    """
    for _ in range(2):
        with statements(engine) as sent:
            claimed = claim(session, model, 1)
        assert words(sent) == (["SELECT"] if model is Task else []) + at_once(engine, model)
        assert (claimed.id, claimed.last_fencing_token) == (1, NEW)
        assert not session.dirty
        claimed.balance += 1
        session.commit()
    assert claimed.balance == 102


def test_claim_without_waiting_sends_one_statement_more(engine: Engine, session: Session) -> None:
    ways: list[dict[str, Any]] = [{"nowait": True}, {"skip_locked": True}]
    for how in ways:
        with statements(engine) as sent:
            claim(session, Account, 1, **how)
        assert words(sent) == ["SELECT", *at_once(engine)]
        session.commit()


def test_claim_all_sends_its_updates_together(engine: Engine, session: Session) -> None:
    with statements(engine) as sent:
        seats = claim_all(session, select(Seat).order_by(Seat.letter.desc()))
    assert [seat.letter for seat in seats] == ["b", "a"]
    assert words(sent) == ["SELECT", "UPDATE", "SELECT"]


@pytest.mark.parametrize("model", MODELS)
def test_each_claim_gives_the_row_a_new_write_id(engine: Engine, session: Session, model: type[Any]) -> None:
    """Also the second under one token, so that nodes of Galera hear of it; the object has the row's id."""

    def stored() -> int:
        with Session(engine) as reading:
            found: int = reading.get_one(model, 1).last_write_id
            return found

    ids = [stored()]
    for how in (claim, claim, lambda *_: claim_all(session, select(model).where(model.id == 1))[0]):
        known = how(session, model, 1).last_write_id
        session.commit()
        assert known == stored()
        ids.append(known)
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize("expire_on_commit", [True, False])
def test_claim_loads_into_the_object_of_the_session(engine: Engine, expire_on_commit: bool) -> None:
    """No part of the object is older than the row: no column, and nothing that is loaded later."""
    with holding(engine, Lease("account:1", NEW), expire_on_commit=expire_on_commit) as session:
        known = session.get_one(Account, 1)
        assert (known.status, known.remark, len(known.notes)) == ("new", "none", 1)
        session.commit()
        with engine.begin() as connection:
            connection.execute(insert(Note), {"id": 2, "account_id": 1, "text": "more"})
            statement = update(Account).where(Account.id == 1).values(status="paid", remark="much")
            connection.execute(statement, execution_options={"fencing_token": OLD})
        with statements(engine) as sent:
            assert claim(session, Account, 1) is known
            assert known.status == "paid"
        assert words(sent) == at_once(engine)
        assert (known.remark, len(known.notes)) == ("much", 2)
        session.commit()
        with engine.begin() as connection:
            connection.execute(insert(Note), {"id": 3, "account_id": 1, "text": "more"})
        assert len(claim(session, Account, 1).notes) == 3, "although the row is the same"
        known.status = "sent"
        session.commit()


def test_claim_flushes_and_leaves_onupdate_alone(engine: Engine, session: Session) -> None:
    known = claim(session, Account, 1)
    assert known.changed == 0
    known.status = "paid"
    with statements(engine) as sent:
        claim(session, Account, 1)
    assert words(sent) == ["UPDATE", *at_once(engine)]
    assert (known.status, known.changed) == ("paid", 1)


def test_refused_claim_says_why(engine: Engine, session: Session) -> None:
    """A second look tells a higher fence from a row that is not there."""
    claim(session, Account, 1)
    session.commit()
    with turned_away(session, NoResultFound):
        claim(session, Seat, (1, "z"))
    with holding(engine, Lease("account:1", OLD)) as stale:
        known = stale.get(Account, 1, execution_options={"fencelock": "bypass"})
        with pytest.raises(StaleTokenError) as caught:
            claim(stale, Account, 1)
        assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), OLD, NEW)
        stale.rollback()
        assert known is not None
        bind(stale, Lease("other", NEW))
        with pytest.raises(fencelock.UnfencedWriteError):
            claim(stale, Account, 1)


def test_criteria_of_a_listener_count(engine: Engine, session: Session) -> None:
    """A listener that hides rows from SELECT hides them from a claim."""

    @event.listens_for(session, "do_orm_execute")
    def hide(state: Any) -> None:
        if state.is_select:
            state.statement = state.statement.options(with_loader_criteria(Account, Account.status != "gone"))

    with statements(engine) as sent:
        claim(session, Account, 1).status = "gone"
    assert words(sent) == TWO
    session.commit()
    with pytest.raises(NoResultFound):
        claim(session, Account, 1)


@pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
def test_row_that_appears_between_two_statements_is_not_claimed(engine: Engine, session: Session) -> None:
    """Its fence was not raised, so that nothing keeps older holders out."""

    def appear(_connection: object, statement: Any, *_: object) -> None:
        if getattr(statement, "is_update", False):
            with bypassed(engine) as connection:
                connection.execute(insert(Eager), {"id": 2})

    event.listen(engine, "after_execute", appear)
    with pytest.raises(NoResultFound):
        claim(session, Eager, 2)
    event.remove(engine, "after_execute", appear)
    assert claim(session, Eager, 2).last_fencing_token == NEW


def test_for_coroutines(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def play(session: AsyncSession) -> None:
        for known in (None, await session.get(Account, 1)):
            await session.commit()
            with statements(aengine.sync_engine) as sent:
                order = await fencelock.claim(session, Account, 1)
                await fencelock.gate(session, "account:1")
            assert words(sent) == [*at_once(engine), "INSERT"]
            assert known in (None, order)
            assert (order.status, order.last_fencing_token) == ("new", NEW)
            order.status = "new"
            await session.commit()
        assert await fencelock.claim_all(session, select(Account)) == [order]
        with pytest.raises(NoResultFound):
            await fencelock.claim(session, Seat, {"row": 1, "letter": "z"})
        await session.commit()
        bind(session, Lease("account:1", OLD))
        for late in (
            fencelock.claim(session, Account, 1),
            fencelock.claim_all(session, select(Account)),
            fencelock.gate(session),
        ):
            with pytest.raises(StaleTokenError):
                await late
            await session.rollback()

    aengine = for_asyncio(engine)
    awaiting(aengine, play, *claims.leases(NEW))
