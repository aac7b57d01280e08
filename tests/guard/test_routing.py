"""In a session that chooses among databases, claims, gates and upserts go to the database of the writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Delete, Engine, Insert, NullPool, Update, create_engine, delete, select
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Session, selectinload

import fencelock
from fencelock import FenceError, Lease, bind, claim, claim_all, gate, upsert
from proof.servers import Postgres
from tests.guard.models import Account, Base, Note, fenced, fences
from tests.guard.rows import holding, refill, rows_of, tables_of

LEASES = [Lease(f"account:{number}", 9) for number in (1, 2)]


def filled(url: Any, identity: int = 1, *, balance: int, **options: Any) -> Engine:
    engine = create_engine(url, **options)
    Base.metadata.create_all(engine, tables_of([Account, Note, fences]))
    rows = fenced(Account, identity, balance=balance)
    return refill(engine, {**rows, Note: {"account_id": identity}})


@pytest.fixture
def leader(tmp_path: Path) -> Engine:
    return filled(f"sqlite:///{tmp_path}/leader.sqlite", balance=70, poolclass=NullPool)


@pytest.fixture
def follower(tmp_path: Path) -> Engine:
    """The database for reads: it is behind, and nothing may be written to it."""
    return filled(f"sqlite:///{tmp_path}/follower.sqlite", balance=100, poolclass=NullPool)


def routing(leader: Any, follower: Any) -> type[Session]:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:  # noqa: ARG002
            writes = self._flushing or isinstance(clause, Insert | Update | Delete)
            return leader if writes else follower

    return Routing


CLAIMS: dict[str, Callable[[Session], Any]] = {
    "claim": lambda session: claim(session, Account, 1),
    "claim_all": lambda session: claim_all(session, select(Account))[0],
    "eagerly": lambda session: claim_all(session, select(Account).options(selectinload(Account.notes)))[0],
}


@pytest.mark.parametrize("how", CLAIMS)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_claim_reads_where_it_has_claimed_or_is_refused(
    postgres: Postgres, leader: Engine, follower: Engine, database: str, how: str
) -> None:
    """One row is claimed and read by one statement; a SELECT that would go to the follower is refused."""
    if database == "postgresql":
        leader = filled(postgres.create_database(), balance=70, poolclass=NullPool)
    with routing(leader, follower)() as session:
        bind(session, *LEASES)
        if how == "claim":
            assert CLAIMS[how](session).balance == 70
        else:
            with pytest.raises(FenceError, match=r"sends its SELECT to .*follower.* not to"):
                CLAIMS[how](session)
            with pytest.raises(PendingRollbackError):
                session.commit()


@pytest.mark.parametrize(
    "how", [claim, lambda session, model, _, **more: claim_all(session, select(model), **more)[0]]
)
def test_a_claim_goes_and_reads_where_it_is_told_to(leader: Engine, follower: Engine, how: Any) -> None:
    with holding(follower, *LEASES) as session:
        assert how(session, Account, 1, bind_arguments={"bind": leader}).balance == 70


def test_gate_and_upsert_go_to_the_leader(leader: Engine, follower: Engine) -> None:
    with Session(binds={Account: leader}) as session:
        bind(session, LEASES[0])
        with pytest.raises(TypeError, match="bind_arguments"):
            gate(session)
        gate(session, bind_arguments={"mapper": Account})
    with routing(leader, follower)() as session:
        bind(session, LEASES[0])
        gate(session)
        upsert(session, Account, [{"id": 1, "balance": 7}])
        session.commit()
    fence = select(fences.c.last_fencing_token)
    assert (rows_of(leader, select(Account.balance)), rows_of(leader, fence)) == ([7], [9])
    assert (rows_of(follower, select(Account.balance)), rows_of(follower, fence)) == ([100], [])


def test_claim_gate_and_upsert_write_nothing_to_a_read_only_follower(postgres: Postgres) -> None:
    url = postgres.create_database()
    leader = filled(url, balance=70, poolclass=NullPool)
    options = {"options": "-c default_transaction_read_only=on"}
    follower = create_engine(url, connect_args=options, poolclass=NullPool)
    ways: list[Callable[[Session], Any]] = [CLAIMS["claim"], gate]
    ways.append(lambda session: upsert(session, Account, [{"id": 1, "balance": 3}]))
    for work in ways:
        with routing(leader, follower)() as session, session.begin():
            bind(session, LEASES[0])
            work(session)
    postgres.drop_database(url)


def test_coroutines_claim_and_pass_gates_at_the_leader(leader: Engine, follower: Engine) -> None:
    async def play() -> None:
        both = [
            create_async_engine(each.url.set(drivername="sqlite+aiosqlite")) for each in (leader, follower)
        ]
        kind = routing(*(each.sync_engine for each in both))
        async with AsyncSession(sync_session_class=kind) as session:
            bind(session, LEASES[0])
            await gate(session)
            await session.commit()
            for claiming in (  # a claim needs a SELECT with aiosqlite
                fencelock.claim(session, Account, 1),
                fencelock.claim_all(session, select(Account)),
            ):
                with pytest.raises(FenceError, match="sends its SELECT"):
                    await claiming
                await session.rollback()
        for each in both:
            await each.dispose()

    asyncio.run(play())
    assert rows_of(leader, select(fences.c.last_fencing_token)) == [9]


class TestShards:
    """A `ShardedSession`, with a chooser that wants an instance, as in SQLAlchemy's example."""

    @pytest.fixture
    def shards(self, tmp_path: Path) -> dict[str, Engine]:
        return {
            "odd": filled(f"sqlite:///{tmp_path}/odd.sqlite", 1, balance=100, poolclass=NullPool),
            "even": filled(f"sqlite:///{tmp_path}/even.sqlite", 2, balance=200, poolclass=NullPool),
        }

    @pytest.fixture
    def session(self, shards: dict[str, Engine]) -> Iterator[Session]:
        def shard_of(number: int) -> str:
            return "odd" if number % 2 else "even"

        chosen: Any = lambda _mapper, key, **_: [shard_of(key[0])]  # noqa: E731  of SQLAlchemy's own type

        with ShardedSession(
            shards=shards,
            shard_chooser=lambda _mapper, instance, _clause=None: shard_of(instance.id),
            identity_chooser=chosen,
            execute_chooser=lambda _: list(shards),
        ) as made:
            bind(made, *LEASES)
            yield made

    def test_a_claim_goes_to_the_shard_of_its_key(self, session: Session) -> None:
        for identity, balance in ((1, 100), (2, 200)):
            known = session.get_one(Account, identity)
            assert claim(session, Account, identity) is known
            known.balance += 1
            session.commit()
            assert known.balance == balance + 1

    def test_one_flush_deletes_in_both_shards(self, session: Session, shards: dict[str, Engine]) -> None:
        for engine in shards.values():
            with engine.begin() as connection:
                connection.execute(delete(Note))
        accounts = [session.get_one(Account, identity) for identity in (1, 2)]
        for account in accounts:
            session.delete(account)
        session.commit()
        for engine in shards.values():
            with Session(engine) as plain:
                assert plain.scalars(select(Account)).all() == []

    def test_claim_all_gate_and_upsert_take_the_rows_of_one_shard(self, session: Session) -> None:
        upsert(session, Account, [{"id": 1, "balance": 3}])
        (account,) = claim_all(session, select(Account), bind_arguments={"shard_id": "even"})
        assert account.id == 2
        gate(session, "account:1", bind_arguments={"shard_id": "odd"})
        session.commit()
        assert session.get_one(Account, 1).balance == 3

    def test_a_shard_that_cannot_be_told_is_asked_for(self, session: Session) -> None:
        rows = [{"id": 1, "balance": 3}, {"id": 2, "balance": 3}]
        with pytest.raises(TypeError, match="shard_id"):
            claim_all(session, select(Account))
        with pytest.raises(TypeError, match=r"even, odd.*shard_id"):
            upsert(session, Account, rows)
        with pytest.raises(TypeError, match="shard_id"):
            gate(session, "account:1")
