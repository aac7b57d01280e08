"""The tables of docs/errors.md have every error class, and say how real databases behave."""

from __future__ import annotations

import ast
import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx
import psycopg
import pymysql
import pytest
import redis
from fastapi import FastAPI
from sqlalchemy import (
    Connection,
    Engine,
    NullPool,
    QueuePool,
    create_engine,
    delete,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, OperationalError, PendingRollbackError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Mapped, Session, mapped_column

from fencelock import (
    CommitInDoubtError,
    Database,
    FencelockError,
    Lease,
    LockLostError,
    Redlock,
    StaleTokenError,
    bind,
    claim,
    errors,
    fenced,
    fenced_lock,
    fenced_transaction,
    http_status,
    is_retryable,
    once,
)
from fencelock.integrations.fastapi import answer_errors
from fencelock.lease import held_leases
from fencelock.tokens import MAX_COUNTER
from proof.pages.blocks import blocks, read
from proof.servers import Nodes
from proof.servers.workspace import free_ports
from tests.door import Door
from tests.immediate import begin_immediate
from tests.jobs.accounts import Account, Base, prepare
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY, stripe_of

WRITTEN: Final = {"no": False, "unknown": None}
CELERY: Final = {"retry", "look first, then retry", "never"}
#: As the first column of the table has them: the name, and what `written` is where the class has no one.
_NAMED: Final = re.compile(r"`(\w+)`(?:, `written` (\w+))?")


class Note(Base):
    __tablename__ = "table_notes"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


#: Not for what a file has not: connections that are lost, and two writers at once.
ON_SERVERS: Final = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
#: For errors that are the same on each database.
ON_POSTGRESQL: Final = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def patience() -> dict[str, Any]:
    return IMPATIENT


@dataclass
class Stage:
    """A database with an account of 100, and two clients of the nodes."""

    engine: Engine
    authority: Redlock
    rival: Redlock
    nodes: Nodes
    make_nodes: Callable[..., Nodes]

    def notes(self) -> list[int]:
        with Session(self.engine) as session:
            return list(session.scalars(select(Note.id).order_by(Note.id)))

    @contextmanager
    def working(self, **settings: Any) -> Iterator[Session]:
        with (
            fenced_lock("account:1", authority=self.authority, **settings),
            Session(self.engine, expire_on_commit=False) as session,
        ):
            yield session
            session.commit()


@pytest.fixture
def stage(
    engine: Engine, authority: Redlock, rival: Redlock, nodes: Nodes, make_nodes: Callable[..., Nodes]
) -> Stage:
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
    prepare(engine)
    return Stage(engine, authority, rival, nodes, make_nodes)


# The tables


_FACTS: Final = ("how to know it", "what happened", "written?")
ORDER: Final = ("class", "error", *_FACTS, "retry?", "HTTP", "Celery")


def table(page: str, first: str) -> list[list[str]]:
    """Return the rows of a table, in the order of `ORDER`: pages begin with what a narrow screen shows."""
    _, _, behind = read(page).partition(f"\n| {first} |")
    text, _, _ = f"| {first} |{behind}".partition("\n\n")
    names, _, *rows = ([cell.strip() for cell in row.strip()[1:-1].split("|")] for row in text.split("\n"))
    places = [names.index(name) for name in ORDER if name in names] or [*range(len(names))]
    return [[row[place] for place in places] for row in rows]


CLASSES: Final = table("docs/errors.md", "class")
ROWS: Final = {row[0]: row for row in CLASSES}


def classes_in(cell: str) -> list[tuple[str, str]]:
    qualified = _NAMED.findall(cell)
    return [(name, said) for name, said in qualified if name.endswith("Error")]


def made(kind: type[FencelockError], said: str) -> FencelockError:
    if issubclass(kind, LockLostError):
        return kind("lost", written={"False": False, "None": None}[said])
    if issubclass(kind, errors.StaleReadError):
        return kind("accounts", (1,), 5, 7, 4)
    if issubclass(kind, StaleTokenError):
        return kind("accounts", (1,), 5, 7)
    return kind("a message")


def test_table_has_each_class_once() -> None:
    (named,) = zip(*(classes_in(row[0]) for row in CLASSES), strict=True)
    assert Counter(name for name, _ in named) == Counter([*errors.__all__, "LockLostError"])
    assert {said for name, said in named if name == "LockLostError"} == {"False", "None"}


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: row[0].replace("`", ""))
def test_row_agrees_with_its_class(row: list[str]) -> None:
    ((name, said),) = classes_in(row[0])
    _, _, written, retry, status, celery = row
    if name == "FencelockError":  # the base of all: its subclasses tell
        assert (written, retry) == ("see `.written`", "see its class")
        return
    error = made(getattr(errors, name), said)
    assert error.written is WRITTEN[written]
    assert is_retryable(error) == (not retry.startswith("no"))
    assert celery in CELERY
    mends = issubclass(getattr(errors, name), errors.AuthorityError)  # an operator, while the queue waits
    assert (celery == "never") == (retry.startswith("no") and not mends)
    assert (written == "unknown") == ("look first" in celery) == ("look first" in retry) == (status == "504")


def printed(page: str, file: str, *names: str) -> dict[str, Any]:
    """Return functions and values of a page's file, without running the rest of it."""
    (block,) = (block for block in blocks(read(page)) if block.file == file)
    kept: list[ast.stmt] = [ast.parse("from __future__ import annotations").body[0]]
    for node in ast.parse(block.text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names:
            node.decorator_list = []
        elif isinstance(node, ast.Assign | ast.AugAssign):
            target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
            if ast.unparse(target) not in names:
                continue
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        kept.append(node)
    found: dict[str, Any] = {"__name__": file}
    exec(compile(ast.Module(kept, []), file, "exec"), found)  # noqa: S102 - this is what the page has
    return found


RAISED: Final = [row for row in CLASSES if row[0] != "`FencelockError`"]


@pytest.mark.parametrize("row", RAISED, ids=lambda row: row[0].replace("`", ""))
def test_pages_on_frameworks_do_as_the_table_says(row: list[str]) -> None:
    ((name, said),) = classes_in(row[0])
    error = made(getattr(errors, name), said)
    assert http_status(error) == int(row[4].split(",")[0])
    celery = printed("docs/celery.md", "tasks.py", "AGAIN", "LOOK_FIRST")
    tried_again = isinstance(error, celery["AGAIN"] + celery["LOOK_FIRST"])
    assert tried_again == (row[5] != "never")
    assert not isinstance(error, celery["AGAIN"]) or row[5] == "retry"


def test_fastapi_answers_where_no_connection_can_be_made() -> None:
    """The error is asyncpg's own, because SQLAlchemy does not wrap it.

    The answer tells nothing of the inside.
    """
    app = FastAPI()
    answer_errors(app)
    (port,) = free_ports(1)

    @app.get("/")
    async def ask() -> None:
        engine = create_async_engine(f"postgresql+asyncpg://user@127.0.0.1:{port}/shop")
        async with engine.connect():
            pass

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            return await client.get("/")

    answer = asyncio.run(main())
    assert (answer.status_code, answer.text) == (503, "Service Unavailable")
    assert answer.headers["Retry-After"] == "1"


DRIVER: Final = {row[0]: row for row in table("docs/errors.md", "error")}
CELERY_CONNECTION: Final = printed("docs/celery.md", "tasks.py", "CONNECTION")["CONNECTION"]


def check_driver(name: str, error: BaseException) -> None:
    row = DRIVER[name]
    assert row[6] in CELERY
    assert is_retryable(error) == (not row[4].startswith("no")), repr(error)
    assert http_status(error) == int(row[5].split(",")[0]), repr(error)
    blocking = not isinstance(error, OSError) and "asyncpg" not in repr(error)  # as the code in a task is
    assert not blocking or isinstance(error, CELERY_CONNECTION)


# Each class, provoked


def locked(stage: Stage, authority: Any = None, resource: str = "account:1") -> Any:
    return fenced_transaction(stage.engine, resource, authority=authority or stage.authority)


def note(session: Session) -> None:
    session.add(Note(id=1))
    session.flush()


def end_lease() -> None:
    for lease in held_leases():
        lease._extend_to(0.0)


def time_out(stage: Stage) -> None:
    with stage.rival.lock("account:1"), stage.working(timeout=0) as session:
        note(session)


def find_no_quorum(stage: Stage) -> None:
    for node in stage.nodes[:3]:
        node.pause()
    with stage.working() as session:
        note(session)


def find_blank_nodes(stage: Stage) -> None:
    with Redlock(stage.make_nodes(1).urls) as blank, locked(stage, blank) as session:
        note(session)


def find_no_lease_table(stage: Stage) -> None:
    with Database(stage.engine) as granting, locked(stage, granting) as session:
        note(session)


def find_another_fleet(stage: Stage) -> None:
    with Redlock(stage.nodes.urls[:3]) as fewer, locked(stage, fewer) as session:
        note(session)


def find_no_counters(stage: Stage) -> None:
    for node in stage.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.hset(NODE_KEY, f"c{stripe_of('account:1')}", str(MAX_COUNTER))
    with stage.working() as session:
        note(session)


def configure_nothing(stage: Stage) -> None:
    with fenced_transaction(stage.engine, "account:1") as session:
        note(session)


def release_what_is_not_held(stage: Stage) -> None:
    with Session(stage.engine) as session:
        note(session)
        stage.authority.lock("account:1").release()
        session.commit()


def hand_over_what_is_entered_twice(stage: Stage) -> None:
    with stage.working() as session:
        note(session)
        with (inner := stage.authority.lock("account:1")):
            inner.hand_over()


def ask_for_something_else(stage: Stage) -> None:
    with Session(stage.engine) as session:
        once(session, "k", fingerprint=1)
        session.commit()
        note(session)
        try:
            once(session, "k", fingerprint=2)
        finally:
            with suppress(PendingRollbackError):
                session.commit()


def be_late(stage: Stage) -> None:
    with stage.authority.lock("account:1") as token:
        pass
    with stage.working() as session:
        claim(session, Account, 1)
    with Session(stage.engine) as session:
        bind(session, Lease("account:1", token))
        note(session)
        claim(session, Account, 1)
        session.commit()


def write_what_is_old(stage: Stage) -> None:
    with stage.working() as session:
        account = session.get_one(Account, 1)
        session.commit()
        with Session(stage.engine) as other:
            other.execute(delete(Account).where(Account.id == 1))
            other.commit()
        note(session)
        account.balance = 0


def write_without_a_lock(stage: Stage) -> None:
    with locked(stage, resource="account:2") as session:
        note(session)
        session.get_one(Account, 1).balance = 0


def go_on_after_a_rollback(stage: Stage) -> None:
    with locked(stage) as session:
        session.rollback()
        note(session)


def be_refused_late(stage: Stage) -> None:
    with stage.working() as session:
        note(session)
        end_lease()
        claim(session, Account, 1).balance = 0


def work_without_the_guard(stage: Stage) -> None:
    with stage.working() as session:
        note(session)
        end_lease()


PROVOKED: Final[dict[str, tuple[Callable[[Stage], None], ...]]] = {
    "LockTimeoutError": (time_out,),
    "QuorumError": (find_no_quorum,),
    "NodesNotInitialisedError": (find_blank_nodes,),
    "LeaseTableMissingError": (find_no_lease_table,),
    "MembershipError": (find_another_fleet,),
    "CountersExhaustedError": (find_no_counters,),
    "AuthorityError": (configure_nothing,),
    "NotHeldError": (release_what_is_not_held,),
    "LockError": (hand_over_what_is_entered_twice,),
    "StaleTokenError": (be_late,),
    "StaleReadError": (write_what_is_old,),
    "UnfencedWriteError": (write_without_a_lock,),
    "ReceiptMismatchError": (ask_for_something_else,),
    "FenceError": (go_on_after_a_rollback,),
    "LockLostError": (be_refused_late, work_without_the_guard),
    "CommitInDoubtError": (),  # below, with a door before the database
}


def test_every_class_is_provoked() -> None:
    assert {*PROVOKED, "FencelockError"} == set(errors.__all__)


@ON_POSTGRESQL
@pytest.mark.parametrize(
    ("name", "provoke"), [(name, each) for name, ways in PROVOKED.items() for each in ways]
)
def test_written_is_what_the_table_holds(
    stage: Stage, name: str, provoke: Callable[[Stage], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """False: nothing is there after the rollback. None: something may be."""
    monkeypatch.delenv("FENCELOCK_URL", raising=False)
    with pytest.raises(FencelockError) as caught:
        provoke(stage)
    assert type(caught.value).__name__ == name
    if caught.value.written is False:
        assert stage.notes() == []
    else:
        assert provoke is work_without_the_guard
        assert stage.notes() == [1]


@pytest.fixture
def door(stage: Stage) -> Iterator[Door]:
    opened = Door(stage.engine)
    yield opened
    opened.close()


@ON_SERVERS
@pytest.mark.parametrize("arrives", [False, True], ids=["never", "arrives"])
def test_commit_in_doubt(stage: Stage, door: Door, *, arrives: bool) -> None:
    door.loses_answers = arrives
    with (
        pytest.raises(CommitInDoubtError) as caught,
        fenced_transaction(door.engine, "account:1", authority=stage.authority) as session,
    ):
        session.add(Note(id=1))
    assert caught.value.written is None
    assert isinstance(caught.value.__cause__, DBAPIError)
    check_driver("connection ends in COMMIT", caught.value.__cause__)
    assert caught.value.__cause__.connection_invalidated
    assert caught.value.__cause__.statement is None
    assert eventually(lambda: stage.notes() == ([1] if arrives else []), 5.0)


# The driver's errors


def end_connection(engine: Engine, session: Session) -> None:
    postgres = engine.dialect.name == "postgresql"
    number = session.scalar(text("SELECT pg_backend_pid()" if postgres else "SELECT connection_id()"))
    end = f"SELECT pg_terminate_backend({number}, 5000)" if postgres else f"KILL {number}"
    with engine.connect() as connection:
        connection.execute(text(end))


def go_idle(session: Session) -> None:
    postgres = session.get_bind().dialect.name == "postgresql"
    setting = "idle_in_transaction_session_timeout = 200" if postgres else "idle_transaction_timeout = 1"
    session.execute(text(f"SET {setting}"))
    time.sleep(0.5 if postgres else 1.5)


def lose_connection(stage: Stage, how: str, *, before: bool) -> None:
    with fenced_transaction(stage.engine, "account:1", authority=stage.authority) as session:
        session.add(Note(id=1))
        session.flush()
        if how == "idle":
            go_idle(session)
        else:
            end_connection(stage.engine, session)
        if before:
            session.execute(text("SELECT 1"))


@ON_SERVERS
@pytest.mark.parametrize("before", [True, False], ids=["before the commit", "at the commit"])
@pytest.mark.parametrize("how", ["ended", "idle"])
def test_nothing_is_written_where_the_connection_is_lost(stage: Stage, how: str, *, before: bool) -> None:
    """At the COMMIT the program cannot tell, unless the server has said why."""
    with pytest.raises((CommitInDoubtError, DBAPIError)) as caught:
        lose_connection(stage, how, before=before)
    is_timeout_of_postgresql = how == "idle" and stage.engine.dialect.name == "postgresql"
    assert isinstance(caught.value, DBAPIError) == (before or is_timeout_of_postgresql)
    if isinstance(caught.value, DBAPIError):
        row = "connection ends before COMMIT" if how == "ended" else "`idle_in_transaction_session_timeout`"
        check_driver(row, caught.value)
        assert not before or (caught.value.connection_invalidated and caught.value.statement)
        assert not is_timeout_of_postgresql or getattr(caught.value.orig, "sqlstate", None) == "25P03"
    assert stage.notes() == []


def two_notes(engine: Engine) -> None:
    """Have two rows that transactions may want."""
    with engine.begin() as connection:
        connection.execute(insert(Note), [{"id": 1}, {"id": 2}])


def write_note(connection: Connection, number: int) -> None:
    connection.execute(update(Note).where(Note.id == number).values(value=1))


@ON_SERVERS
def test_deadlock(stage: Stage) -> None:
    two_notes(stage.engine)
    met = threading.Barrier(2)

    def take(first: int, then: int) -> DBAPIError | None:
        with stage.engine.connect() as connection:
            write_note(connection, first)
            met.wait(60)
            try:
                write_note(connection, then)
            except DBAPIError as error:
                return error
            connection.commit()
            return None

    with ThreadPoolExecutor(2) as threads:
        told = [each.result() for each in (threads.submit(take, 1, 2), threads.submit(take, 2, 1))]
    (error,) = (each for each in told if each is not None)
    check_driver("deadlock", error)
    assert {getattr(error.orig, "sqlstate", None), *getattr(error.orig, "args", ())} & {"40P01", 1213}


LIMITS: Final = {
    "postgresql": "SET lock_timeout = 100",
    "mysql": "SET innodb_lock_wait_timeout = 1",
    "sqlite": "PRAGMA busy_timeout = 100",
}


def test_lock_timeout(stage: Stage) -> None:
    engine = create_engine(stage.engine.url, poolclass=NullPool)
    two_notes(engine)
    with engine.connect() as first, engine.connect() as second:
        write_note(first, 1)
        second.exec_driver_sql(LIMITS[engine.dialect.name])
        if engine.dialect.name != "sqlite":
            write_note(second, 2)
        with pytest.raises(DBAPIError) as caught:
            write_note(second, 1)
        second.rollback()
        first.rollback()
        assert set(first.scalars(select(Note.value))) == {0}
    check_driver("lock timeout", caught.value)


@ON_SERVERS
def test_snapshot_that_is_too_old(stage: Stage) -> None:
    postgres = stage.engine.dialect.name == "postgresql"
    two_notes(stage.engine)
    engine = stage.engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as first, stage.engine.connect() as second:
        if not postgres:
            with suppress(OperationalError):
                first.exec_driver_sql("SET innodb_snapshot_isolation = ON")
                first.commit()
        first.execute(select(Note)).all()
        write_note(second, 1)
        second.commit()
        write_note(first, 2)
        with pytest.raises(DBAPIError) as caught:
            write_note(first, 1)
        first.rollback()
        assert first.scalar(select(Note.value).where(Note.id == 2)) == 0
    check_driver("serialization failure" if postgres else "record has changed", caught.value)
    assert {getattr(caught.value.orig, "sqlstate", None), *getattr(caught.value.orig, "args", ())} & {
        "40001",
        1020,
    }


@ON_POSTGRESQL
def test_no_connection_can_be_made(stage: Stage) -> None:
    url = stage.engine.url.difference_update_query(["host", "port"]).set(host="127.0.0.1", port=1)
    with pytest.raises(OperationalError) as caught:
        create_engine(url).connect()
    check_driver("no connection can be made", caught.value)


def test_no_connection_of_the_pool_is_free() -> None:
    engine = create_engine("sqlite://", poolclass=QueuePool, pool_size=1, max_overflow=0, pool_timeout=0)
    with engine.connect(), pytest.raises(PoolTimeoutError) as caught:
        engine.connect()
    check_driver("no connection of the pool is free", caught.value)
    engine.dispose()


def test_a_server_that_takes_no_writes_refuses_connections_and_statements() -> None:
    for code in ("57P01", "57P02", "57P03", "53300", "25006", 1040, 1047, 1290):
        for statement in {
            "SELECT 1",
            None if code in {"57P03", "53300", "25006", 1040, 1290} else "SELECT 1",
        }:
            check_driver("the server takes no writes now", told_by_server(code, statement))


def told_by_server(code: str | int, statement: str | None) -> DBAPIError:
    if isinstance(code, int):
        return OperationalError(statement, None, pymysql.err.OperationalError(code, "no"))
    return OperationalError(statement, None, psycopg.errors.lookup(code)("no"))


@ON_POSTGRESQL
def test_asyncpg_has_the_same(stage: Stage) -> None:
    two_notes(stage.engine)

    async def told(connection: AsyncConnection, statement: Any) -> DBAPIError:
        with pytest.raises(DBAPIError) as caught:
            await connection.execute(statement)
        await connection.rollback()
        return caught.value

    async def main() -> None:
        engine = create_async_engine(stage.engine.url.set(drivername="postgresql+asyncpg"))
        write = update(Note).where(Note.id == 1).values(value=1)
        async with engine.connect() as first, engine.connect() as second:
            await first.execute(write)
            await second.execute(text("SET lock_timeout = 100"))
            check_driver("lock timeout", await told(second, write))
            await first.rollback()
        async with engine.connect() as first, engine.connect() as second:
            await first.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
            await first.execute(select(Note))
            await second.execute(write)
            await second.commit()
            check_driver("serialization failure", await told(first, write))
        async with engine.connect() as idle:
            await idle.execute(text("SET idle_in_transaction_session_timeout = 200"))
            await asyncio.sleep(0.5)
            check_driver("`idle_in_transaction_session_timeout`", await told(idle, select(Note)))
        await engine.dispose()

    asyncio.run(main())


# Leaving a block whose lease has ended


Body = Callable[[Session], Any]
Leave = Callable[..., Any]


def transaction(stage: Stage, bind: Any, **settings: Any) -> Any:
    return fenced_transaction(bind, "account:1", gate=False, authority=stage.authority, **settings)


def in_lock(stage: Stage, body: Body, **settings: Any) -> Any:
    with fenced_lock("account:1", authority=stage.authority, **settings), Session(stage.engine) as session:
        return body(session)


def in_run(stage: Stage, body: Body, **settings: Any) -> Any:
    return transaction(stage, stage.engine, **settings).run(body)


def with_asyncio(way: Callable[..., Any]) -> Leave:
    def leave(stage: Stage, body: Body, **settings: Any) -> Any:
        async def main() -> Any:
            engine = create_async_engine(stage.engine.url)
            try:
                return await way(stage, engine, body, **settings)
            finally:
                await engine.dispose()
                await stage.authority.aio.close()

        return asyncio.run(main())

    return leave


async def in_async_transaction(stage: Stage, engine: Any, body: Body, **settings: Any) -> Any:
    async with transaction(stage, engine, **settings) as session:
        return await session.run_sync(body)


async def in_coroutine(stage: Stage, engine: Any, body: Body, **settings: Any) -> Any:
    @fenced("account:1", authority=stage.authority, **settings)
    async def work() -> Any:
        async with AsyncSession(engine) as session:
            return await session.run_sync(body)

    return await work()


LEAVE: Final[dict[str, Leave]] = {
    "fenced_lock": in_lock,
    "run": in_run,
    "fenced_transaction asyncio": with_asyncio(in_async_transaction),
    "fenced asyncio": with_asyncio(in_coroutine),
}


def write(session: Session) -> None:
    claim(session, Account, 1).balance -= 10
    note(session)


def commit_late(session: Session) -> str:
    write(session)
    end_lease()
    session.commit()
    return "paid"


def write_late(session: Session) -> None:
    write(session)
    end_lease()
    session.get_one(Account, 1).balance -= 10
    session.commit()


def write_first_when_it_is_late(session: Session) -> None:
    account = session.get_one(Account, 1)
    end_lease()
    account.balance -= 10
    session.commit()


def think_better(session: Session) -> None:
    write(session)
    session.rollback()
    end_lease()


def write_beside_the_guard(session: Session) -> None:
    note(session)
    session.commit()
    end_lease()


def fail_after_a_commit(session: Session) -> None:
    write(session)
    session.commit()
    fail_late(session)


def fail_late(_session: Session) -> None:
    end_lease()
    raise ZeroDivisionError


@dataclass
class Late:
    """A body that outlives its lease, and the facts after it."""

    body: Body
    error: type[BaseException] | None
    written: Any
    notes: list[int]
    says: str = ""
    says_not: str = "?"


LATE: Final = [
    Late(commit_late, None, ..., [1], says="ended before the work did"),
    Late(write_late, LockLostError, written=False, notes=[]),
    Late(
        write_first_when_it_is_late,
        LockLostError,
        written=False,
        notes=[],
        says_not="nothing went through the guard",
    ),
    Late(think_better, LockLostError, written=False, notes=[]),
    Late(write_beside_the_guard, LockLostError, written=None, notes=[1]),
    Late(fail_after_a_commit, ZeroDivisionError, ..., [1], says="stays committed"),
    Late(fail_late, ZeroDivisionError, ..., [], says_not="stays committed"),
]


@ON_POSTGRESQL
@pytest.mark.parametrize("late", LATE, ids=lambda late: late.body.__name__)
@pytest.mark.parametrize("more", [0, 2], ids=["one way", "another way"])
def test_leaving_a_block_that_has_lost_its_lease_says_what_was_written(
    stage: Stage, caplog: pytest.LogCaptureFixture, late: Late, more: int
) -> None:
    leave = [*LEAVE.values()][(LATE.index(late) + more) % 4]
    if late.error is None:
        assert leave(stage, late.body) == "paid"
        told = warnings(caplog)
    else:
        with pytest.raises(late.error) as caught:
            leave(stage, late.body)
        assert getattr(caught.value, "written", ...) is late.written
        told = getattr(caught.value, "__notes__", [])
        assert len(told) == 1 or late.error is LockLostError
        assert warnings(caplog) == []
    assert late.says in " ".join(told)
    assert late.says_not not in " ".join(told)
    assert stage.notes() == late.notes


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fencelock.lock"]


@ON_POSTGRESQL
@pytest.mark.parametrize("way", LEAVE)
def test_if_lost_warn_only_logs(stage: Stage, caplog: pytest.LogCaptureFixture, way: str) -> None:
    told: list[Lease] = []

    def listen(_session: Session) -> None:
        lock = fenced_lock("account:1", authority=stage.authority)
        lock.on_lost(told.append)
        if "asyncio" not in way:
            with lock:
                pass
        end_lease()

    LEAVE[way](stage, listen, if_lost="warn")
    (warning,) = warnings(caplog)
    assert "nothing went through the guard" in warning
    assert "asyncio" in way or eventually(lambda: [lease.resource for lease in told] == ["account:1"])
