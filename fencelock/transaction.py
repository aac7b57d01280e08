"""`fenced_transaction`: acquires the lock, begins a transaction, passes the gates, commits, and releases.

This module joins the lock and the guard. A lease notes if the outcome of a COMMIT is unknown, and `run` can
then call its body again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, Unpack, overload

from sqlalchemy import Engine, event, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction, scoped_session, sessionmaker

from fencelock._checks import check_callback, check_flag, check_result
from fencelock._databases import leaves_doubt
from fencelock._engines import is_async_engine, is_async_maker, is_async_scoped, is_async_session
from fencelock._locking import fenced_lock
from fencelock._owners import current_owner
from fencelock.errors import CommitInDoubtError, FenceError
from fencelock.guard import gate as pass_gate
from fencelock.guard._gate import FENCES
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import AllLockSettings

if TYPE_CHECKING:
    import typing_extensions
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker

    _S = typing_extensions.TypeVar("_S", bound=Session, default=Session)
    _A = typing_extensions.TypeVar("_A", bound="AsyncSession", default="AsyncSession")
else:  # before Python 3.13, a TypeVar of `typing` takes no default
    _S, _A = TypeVar("_S"), TypeVar("_A")

_R = TypeVar("_R")
_Made = TypeVar("_Made")

_TAKES: Final = "fenced_transaction takes a sessionmaker, a scoped_session or an engine"
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Plan(Generic[_Made]):
    """The arguments of a fenced transaction, checked."""

    make: Callable[[], _Made]  # returns a new session, or the shared one
    shared: bool  # the program uses the session before and after, so it is not closed
    resources: tuple[str, ...]
    retries: int
    gate: bool
    settings: AllLockSettings
    gates: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int):
            raise TypeError(f"retries is a number from 0, not {self.retries!r}")
        if self.retries < 0:
            raise ValueError(f"retries is a number from 0, not {self.retries}")
        check_flag("gate", self.gate)
        self.lock()  # checks the resources and the settings
        # Sorted, so that two transactions with the same gates wait for each other instead of deadlocking.
        object.__setattr__(self, "gates", tuple(sorted({*self.resources})) if self.gate else ())

    def lock(self) -> FencedLock[Any]:
        return fenced_lock(*self.resources, **self.settings)

    def refuse_retries(self) -> None:
        if self.retries:
            raise TypeError("a `with` block cannot be run again: give its body to run(), or drop retries")

    def pause_before(self, attempt: int, lock: FencedLock[Any]) -> float | None:
        """Return how many seconds to pause before this retry (from 1); None if it must not be made."""
        if attempt > self.retries or not any(lease.in_doubt for lease in lock.leases):
            return None
        return 0.0 if attempt == 1 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 2))


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A fenced transaction whose block is running."""

    session: Any  # the session of the block: a Session or an AsyncSession
    owner: object  # the thread, task or greenlet that runs the block
    resources: tuple[str, ...]


_open: list[_Open] = []


def _outer(plan: _Plan[_Made], session: _Made) -> _Made | None:
    """Return the session of the outer block that a new block must join, or None.

    The two blocks have owner, pool and a resource in common. In another session, the new block would wait
    for ever at the outer gate.
    """
    owner = current_owner()
    for other in reversed(tuple(_open)):
        if (
            other.owner == owner
            and isinstance(other.session, Session) == isinstance(session, Session)
            and not set(other.resources).isdisjoint(plan.resources)
            and _pool_of(other.session) is _pool_of(session)
        ):
            return other.session  # type: ignore[no-any-return]
    return None


def _pool_of(session: Any) -> object:
    try:
        return session.get_bind(clause=update(FENCES)).engine.pool
    except UnboundExecutionError:
        return session  # with several databases, only this very session counts as the same pool


@contextmanager
def _noted(session: object, plan: _Plan[Any]) -> Iterator[None]:
    noted = _Open(session, current_owner(), plan.resources)
    _open.append(noted)
    try:
        yield
    finally:
        _open.remove(noted)


@contextmanager
def _transaction(made: _Made, plan: _Plan[_Made]) -> Iterator[_Made]:
    """Run a block in a transaction, or in a savepoint of an outer block; pass the gates; yield the session.

    Coroutines enter and leave this context by `AsyncSession.run_sync`.
    """
    if (outer := _outer(plan, made)) is not None:
        with _blocking(outer).begin_nested():
            _pass_gates(_blocking(outer), plan)
            yield outer
        return
    session = _blocking(made)
    if plan.shared and session.in_transaction():
        raise FenceError(
            "this session has a transaction open that began before the lock was acquired: commit it "
            "or roll it back first, and read again inside the block"
        )
    try:
        if not session.in_transaction():
            session.begin()
        _pass_gates(session, plan)
        with _only_this_transaction(session) if plan.gates else nullcontext(), _noted(made, plan):
            yield made
            if session.in_transaction() or any((session.new, session.dirty, session.deleted)):
                session.flush()  # before the COMMIT, because an error of the flush leaves no doubt
                _commit(session, plan.resources)
    finally:
        if plan.shared:
            session.rollback()  # ends its transaction, because a shared session is not closed


def _blocking(session: Any) -> Session:
    its: Session = getattr(session, "sync_session", session)
    return its


def _pass_gates(session: Session, plan: _Plan[Any]) -> None:
    for resource in plan.gates:
        pass_gate(session, resource)


class _Blocks:
    """The open blocks of one fenced transaction, each with the thread, task or greenlet that entered it."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: list[tuple[object, Any]] = []

    def add(self, block: object) -> None:
        self._open.append((current_owner(), block))

    def take(self) -> Any:
        """Remove and return the block to leave: the last of this thread, task or greenlet, or the only one.

        A framework may leave a generator in another thread. If several blocks are open then, RuntimeError is
        raised.
        """
        entries = tuple(self._open)
        owner = current_owner()
        ours = [entry for entry in entries if entry[0] == owner] or (entries if len(entries) == 1 else ())
        if not ours:
            raise RuntimeError(
                "several threads or tasks are inside this fenced transaction, and this one has not entered "
                "it, so it is unclear whose block ends here: give each thread or task an object of its own"
            )
        self._open.remove(ours[-1])
        return ours[-1][1]


@contextmanager
def _only_this_transaction(session: Session) -> Iterator[None]:
    """Refuse a second transaction in a block with gates, because it would not have passed them."""

    def refuse(_: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            transaction.close()
            raise FenceError(
                "the transaction that has passed the gates was ended inside its block, by commit(), "
                "rollback() or close(): leave the block and enter another one; what may fail and "
                "be tried again goes into a savepoint, session.begin_nested()"
            )

    event.listen(session, "after_transaction_create", refuse)
    try:
        yield
    finally:
        event.remove(session, "after_transaction_create", refuse)


def _commit(session: Session, resources: tuple[str, ...]) -> None:
    try:
        session.commit()
    except Exception as error:
        if not leaves_doubt(error):
            raise
        names = ", ".join(map(repr, resources))
        raise CommitInDoubtError(
            f"the outcome of the COMMIT is unknown ({str(error).splitlines()[0]}). The lock of {names} is "
            "being released: lock again, and look at the row before you write it again. Where an outer "
            "block still holds the lock, call its remint() first. To do all this automatically: "
            "fenced_transaction(…, retries=2).run(body)"
        ) from error


class FencedTransaction(Generic[_S]):
    """A `fenced_transaction` for blocking code: enter it with `with`, or call `run`."""

    def __init__(self, plan: _Plan[_S]) -> None:
        self._plan = plan
        self._open = _Blocks()

    def __enter__(self) -> _S:
        self._plan.refuse_retries()
        block = self._block(self._plan.lock())
        session = block.__enter__()
        self._open.add(block)
        return session

    def __exit__(self, *raised: object) -> bool | None:
        return bool(self._open.take().__exit__(*raised))

    def run(self, body: Callable[[_S], _R]) -> _R:
        """Call `body` with the session, commit, and return what it returned.

        If the outcome of the COMMIT is unknown, a new token is minted, and passes the gates. Then the body is
        called again, up to `retries` times. The first call's work may have been committed, so the
        body must check this, most simply with `once`. Without gates, the first COMMIT may come after the
        second call has loaded an object. `StaleReadError` refuses this object.

        Returns:
            The value that `body` returned.

        Raises:
            CommitInDoubtError: the outcome of the COMMIT is unknown, and no retries are left.
            LockLostError, AuthorityError: no new token could be minted.
        """
        check_callback("run, with a blocking engine or session,", "session", body)
        lock = self._plan.lock()
        with lock:
            attempt = 0
            while True:
                attempt += 1
                try:
                    with self._block(nullcontext()) as session:
                        return check_result("the body", body(session))
                except Exception:
                    pause = self._plan.pause_before(attempt, lock)
                    if pause is None:
                        raise
                time.sleep(pause)
                lock.remint()

    @contextmanager
    def _block(self, lock: AbstractContextManager[Any]) -> Iterator[_S]:
        with lock:
            made = self._plan.make()
            with nullcontext() if self._plan.shared else made, _transaction(made, self._plan) as session:
                yield session


class AsyncFencedTransaction(Generic[_A]):
    """A `fenced_transaction` for coroutines: enter it with `async with`, or await `run`."""

    def __init__(self, plan: _Plan[_A]) -> None:
        self._plan = plan
        self._open = _Blocks()

    async def __aenter__(self) -> _A:
        self._plan.refuse_retries()
        block = self._block(self._plan.lock())
        session = await block.__aenter__()
        self._open.add(block)
        return session

    async def __aexit__(self, *raised: object) -> bool | None:
        return bool(await self._open.take().__aexit__(*raised))

    async def run(self, body: Callable[[_A], Awaitable[_R]]) -> _R:
        """Await `body` with the session, commit, and return what it returned: see `FencedTransaction.run`."""
        if not callable(body):
            raise TypeError(f"run takes a coroutine function of the session, not {body!r}")
        lock = self._plan.lock()
        async with lock:
            attempt = 0
            while True:
                attempt += 1
                try:
                    async with self._block(nullcontext()) as session:
                        return await body(session)
                except Exception:
                    pause = self._plan.pause_before(attempt, lock)
                    if pause is None:
                        raise
                await asyncio.sleep(pause)
                await lock.aio.remint()

    @asynccontextmanager
    async def _block(self, lock: AbstractAsyncContextManager[Any]) -> AsyncIterator[_A]:
        async with lock, nullcontext(self._plan.make()) as made, nullcontext() if self._plan.shared else made:
            block = _transaction(made, self._plan)
            session = await made.run_sync(lambda _: block.__enter__())
            try:
                yield session
            except BaseException as error:
                raised = (type(error), error, error.__traceback__)
                if not await made.run_sync(lambda _: block.__exit__(*raised)):
                    raise
            else:
                await made.run_sync(lambda _: block.__exit__(None, None, None))


class _Terms(AllLockSettings, total=False):
    retries: int
    gate: bool


@overload
def fenced_transaction(
    session: sessionmaker[_S] | scoped_session[_S], /, *resources: str, **settings: Unpack[_Terms]
) -> FencedTransaction[_S]: ...
@overload
def fenced_transaction(
    session: Engine, /, *resources: str, **settings: Unpack[_Terms]
) -> FencedTransaction[Session]: ...
@overload
def fenced_transaction(
    session: async_sessionmaker[_A] | async_scoped_session[_A], /, *resources: str, **settings: Unpack[_Terms]
) -> AsyncFencedTransaction[_A]: ...
@overload
def fenced_transaction(
    session: AsyncEngine, /, *resources: str, **settings: Unpack[_Terms]
) -> AsyncFencedTransaction[AsyncSession]: ...
def fenced_transaction(
    session: Any, /, *resources: str, retries: int = 0, gate: bool = True, **settings: Unpack[AllLockSettings]
) -> FencedTransaction[Any] | AsyncFencedTransaction[Any]:
    """Return a transaction under a lock. Enter it with `with` or `async with`; it yields the session.

    In this order: the lock is acquired; a session begins its transaction, and passes the gate of each
    resource; the body runs; the transaction is committed, or rolled back if the body raised; the session is
    closed; the lock is released. An older holder that passes the same gate cannot write between the body's
    reads and its writes, not even new rows. If an older holder passes no gate and writes a row that the
    body has read, the body's write of that row raises `StaleReadError`.

    Blocks may be nested, for one of the same resources, on the same engine, and in the same thread, task or
    greenlet. The inner block yields the outer block's session, in a savepoint, and is committed with it.
    Meanwhile other sessions of this thread, task or greenlet cannot pass the same gates (`FenceError`). If
    the isolation keeps a snapshot (MariaDB's default), an inner block that locks a further resource raises
    `StaleReadError`.

    Args:
        session: a `sessionmaker`, a `scoped_session` or an `Engine`; for coroutines, an asyncio class of the
            same kind. A scoped session must not have a transaction open, and is not closed afterwards.
        *resources: the names of the resources to lock.
        retries: how often `run` calls its body again after a COMMIT in doubt. A `with` block cannot run its
            body again, so it takes no retries.
        gate: whether to pass the gates, for which the database needs the fence table (`fence_table`). Without
            gates, claim rows before you read them.
        **settings: the settings of the lock: see `fenced_lock`.

    Raises:
        CommitInDoubtError: at the end of the block, if the answer to its COMMIT was lost.
        FenceError: if the body works on after its transaction has ended, if a scoped session has a
            transaction open, or if a gate would wait for another transaction of this thread or task.
        TypeError: for arguments of the wrong type, and for retries with a `with` block. Entering raises what
            `FencedLock.acquire` and `gate` raise.
        ValueError: for arguments out of range.

    Example:
        ```python
        with fenced_transaction(engine, "order:1") as session:       # async with, for an AsyncEngine
            session.get_one(Order, 1).status = "paid"

        def pay(session: Session) -> None:
            session.get_one(Order, 1).status = "paid"                # once more does no harm

        fenced_transaction(engine, "order:1", retries=2).run(pay)    # await ….run(…), for an AsyncEngine
        ```
    """
    if isinstance(session, type | Session) or is_async_session(session):
        raise TypeError(f"{_TAKES}, not {session!r}: it makes a session of its own, so give it the engine")
    return transaction_of(session, resources, retries=retries, gate=gate, settings=settings)


def transaction_of(
    source: Any, resources: tuple[str, ...], *, retries: int, gate: bool, settings: AllLockSettings
) -> FencedTransaction[Any] | AsyncFencedTransaction[Any]:
    """Return a fenced transaction. A session or a scoped session as `source` is not closed."""
    make, shared = source, isinstance(source, scoped_session) or is_async_scoped(source)
    if isinstance(source, Session) or is_async_session(source):
        make, shared = (lambda: source), True
    elif isinstance(source, Engine):
        make = sessionmaker(source)
    elif is_async_engine(source):
        from sqlalchemy.ext.asyncio import async_sessionmaker  # noqa: PLC0415 - needs greenlet

        make = async_sessionmaker(source)
    elif not (isinstance(source, sessionmaker) or shared or is_async_maker(source)):
        raise TypeError(f"{_TAKES}, not {source!r}")
    plan = _Plan(make, shared, resources, retries, gate, settings)
    is_async = any(
        its(source) for its in (is_async_engine, is_async_maker, is_async_scoped, is_async_session)
    )
    return AsyncFencedTransaction(plan) if is_async else FencedTransaction(plan)
