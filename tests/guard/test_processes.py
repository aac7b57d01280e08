"""Processes that claim and increment one row lose no update, each with a token of its own and no lock."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import pytest
from sqlalchemy import create_engine, event, insert, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, StaleTokenError, bind, claim
from tests.guard.rows import bypassed, holding, rows_of
from tests.immediate import begin_immediate

PROCESSES = 4
INCREMENTS = 15


class Base(DeclarativeBase): ...


class Counter(FencedModel, Base):
    __tablename__ = "pr_counters"
    __fence_resource__ = "counter:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


def work(url: str, tokens: Any, acknowledged: Any, reading_first: bool) -> None:
    """Increment until enough commits are acknowledged; a refused attempt takes a new token."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite" and reading_first:
        begin_immediate(engine)
    done = 0
    while done < INCREMENTS:
        with tokens.get_lock():
            tokens.value += 1
            token = tokens.value
        with holding(engine, Lease("counter:1", token)) as session:
            try:
                if reading_first:
                    session.scalars(select(Counter.value)).all()
                claim(session, Counter, 1).value += 1
                session.commit()
            except StaleTokenError:
                continue
        done += 1
        with acknowledged.get_lock():
            acknowledged.value += 1


@pytest.mark.long
@pytest.mark.parametrize("reading_first", [False, True])
def test_no_acknowledged_increment_is_lost(database_url: str, reading_first: bool) -> None:
    engine = create_engine(database_url)
    Base.metadata.create_all(engine)
    with bypassed(engine) as connection:
        connection.execute(insert(Counter), {"id": 1})
    engine.dispose()
    context = mp.get_context("spawn")
    tokens, acknowledged = context.Value("q", 0), context.Value("q", 0)
    workers = [
        context.Process(target=work, args=(database_url, tokens, acknowledged, reading_first))
        for _ in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    ((value, fence),) = rows_of(engine, select(Counter.value, Counter.last_fencing_token))
    assert value == acknowledged.value == PROCESSES * INCREMENTS
    assert PROCESSES * INCREMENTS <= fence <= tokens.value
    engine.dispose()


def test_a_deferred_transaction_that_has_read_cannot_claim(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path / 'test.sqlite'}"
    deferred, other = create_engine(url), create_engine(url)
    event.listen(deferred, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(deferred, "begin", lambda connection: connection.exec_driver_sql("BEGIN DEFERRED"))
    Base.metadata.create_all(other)
    with bypassed(other) as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    with bypassed(other) as connection:
        connection.execute(insert(Counter), {"id": 1})
    with Session(deferred) as reader, Session(other) as writer:
        reader.scalars(select(Counter.value)).all()
        for token, session in ((1, writer), (2, reader)):
            bind(session, Lease("counter:1", token))
        claim(writer, Counter, 1)
        writer.commit()
        with pytest.raises(DBAPIError, match="locked"):
            claim(reader, Counter, 1)
    deferred.dispose()
    other.dispose()
