"""Does the work of `once` among savepoints, rollbacks, errors that it swallows, COMMITs and cancellations.

Each run has a key of its own, and a body at random: the work, and disturbances before and after it. If the
call fails, another body tries again, and the last one has no disturbance. Afterwards the key is called once
more. `proof.receipts` runs this on each database, in blocking code and in coroutines. The control leaves out
the check at the COMMIT, and the one at the end of the function.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final
from unittest import mock

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencelock import Database, FenceError, FencelockError, _fenced_once, fenced_once, once
from fencelock.guard import receipts
from fencelock.guard.leases import open_leases
from proof.effects import Effect, effects_of, make_tables, work

#: The drivers for coroutines.
FOR_COROUTINES: Final = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+aiomysql",
}
_TRIES: Final = 4  # the last one has no disturbance
_PLACES: Final = 30  # a cancellation of blocking code comes before or after one of the first statements
_SECONDS: Final = 0.03  # a task is cancelled within this time


class CancelledHere(BaseException):
    """Raised in the middle of an execution, as a signal handler does."""


def _savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Effect(key="beside"))


def _failing_savepoint(session: Session) -> None:
    with suppress(ZeroDivisionError), session.begin_nested():
        session.add(Effect(key="undone"))
        session.flush()
        raise ZeroDivisionError


def _receipt_in_a_failing_savepoint(session: Session) -> None:
    with suppress(ZeroDivisionError), session.begin_nested():
        once(session, f"undone {random.random()}").result = 1
        raise ZeroDivisionError


def _error_in_a_savepoint(session: Session) -> None:
    with suppress(DBAPIError), session.begin_nested():
        session.execute(text("SELECT nothing FROM nowhere"))


def _swallowed_error(session: Session) -> None:
    """PostgreSQL has undone the transaction then."""
    with suppress(DBAPIError):
        session.execute(text("SELECT nothing FROM nowhere"))


def _rollback(session: Session) -> None:
    session.rollback()


def _rollback_by_the_driver(session: Session) -> None:
    session.connection().connection.rollback()


def _or_rollback(session: Session) -> None:
    """The database undoes the whole transaction, and the body swallows that."""
    if session.get_bind().dialect.name == "sqlite":
        with suppress(DBAPIError):
            for _ in range(2):
                session.execute(
                    text("INSERT OR ROLLBACK INTO receipt_effects (id, \"key\") VALUES (-1, 'undone')")
                )
    else:
        _rollback_by_the_driver(session)


def _implicit_commit(session: Session) -> None:
    """MariaDB commits at such a statement, and the guard refuses it."""
    if session.get_bind().dialect.name in {"mysql", "mariadb"}:
        with suppress(FenceError):
            session.execute(text("ANALYZE TABLE receipt_totals"))


def _commit(session: Session) -> None:
    with suppress(FenceError):
        session.commit()


def _failure(_session: Session) -> None:
    raise ZeroDivisionError


_IN_BOTH: Final = (
    *(_savepoint, _failing_savepoint, _receipt_in_a_failing_savepoint, _error_in_a_savepoint),
    *(_swallowed_error, _rollback_by_the_driver, _or_rollback, _implicit_commit, _failure),
)
#: A function of `fenced_once` does not end its transaction; in other code, `rollback()` begins another one.
_IN_FUNCTIONS: Final = (*_IN_BOTH, _rollback, _commit)

Step = Callable[[Session], None]


class _Canceller:
    """Raises in blocking code before or after one of the executions that follow."""

    def __init__(self, engine: Engine) -> None:
        self.left = 0
        for name in ("before_cursor_execute", "after_cursor_execute"):
            event.listen(engine, name, self._pass)

    def _pass(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise CancelledHere


class _Plan:
    """The tries of all runs, at random."""

    def __init__(self, seed: int) -> None:
        self._chooser = random.Random(seed)

    def body(self, key: str, *, left: int, is_decorated: bool) -> Step:
        """Return the body of a try; the one after which none is `left` has no disturbance."""
        steps = _IN_FUNCTIONS if is_decorated else _IN_BOTH
        before, after = (
            self._chooser.sample(steps, self._chooser.choice((0, 0, 1, 2)) if left else 0) for _ in range(2)
        )

        def body(session: Session) -> None:
            for step in before:
                step(session)
            work(session, key)
            for step in after:
                step(session)

        return body

    def cancels_at(self, most: float, *, left: int) -> float:
        """Return when a try is cancelled; 0 for never."""
        return self._chooser.choice((0.0, 0.0, self._chooser.uniform(0, most))) if left else 0.0


_DISTURBED: Final = (FencelockError, SQLAlchemyError, ZeroDivisionError, CancelledHere, TimeoutError)


def in_threads(url: str, runs: int, seed: int, authority: Database) -> Counter[str]:
    """Do the work of each key in blocking code; return how often what happened."""
    plan, counts = _Plan(seed), Counter[str]()
    engine = create_engine(url, poolclass=NullPool)
    canceller = _Canceller(engine)

    def by_hand(key: str, body: Step) -> Any:
        with Session(engine) as session, session.begin():
            receipt = once(session, key)
            if not receipt.done:
                receipt.result = key
                body(session)
            return receipt.result

    def decorated(key: str, body: Step) -> Any:
        @fenced_once("{key}", "total:1", fingerprint=lambda *_: None, gate=False, authority=authority)
        def function(session: Session, key: str) -> str:
            body(session)
            return key

        return function(engine, key)

    for number in range(runs):
        key, is_decorated = f"run {number}", bool(number % 2)
        for left in reversed(range(_TRIES)):
            canceller.left = round(plan.cancels_at(_PLACES, left=left))
            body = plan.body(key, left=left, is_decorated=is_decorated)
            try:
                answer = (decorated if is_decorated else by_hand)(key, body)
            except _DISTURBED as error:
                counts[type(error).__name__] += 1
            else:
                counts["another result"] += answer != key
                break
        canceller.left, body = 0, plan.body(key, left=0, is_decorated=False)
        counts["another result"] += (decorated if is_decorated else by_hand)(key, body) != key
    engine.dispose()
    return counts + effects_of(url, runs)


async def in_coroutines(url: str, runs: int, seed: int, authority: Database) -> Counter[str]:
    """Do the same in coroutines; each cancellation is that of a task."""
    plan, counts = _Plan(seed), Counter[str]()
    blocking = make_url(url)
    driver = FOR_COROUTINES[blocking.get_backend_name()]
    engine = create_async_engine(blocking.set(drivername=driver), poolclass=NullPool)

    async def by_hand(key: str, body: Step) -> Any:
        async with AsyncSession(engine) as session, session.begin():
            receipt = await once(session, key)
            if not receipt.done:
                receipt.result = key
                await session.run_sync(body)
            return receipt.result

    async def decorated(key: str, body: Step) -> Any:
        @fenced_once("{key}", "total:1", fingerprint=lambda *_: None, gate=False, authority=authority)
        async def function(session: AsyncSession, key: str) -> str:
            await session.run_sync(body)
            return key

        return await function(engine, key)

    for number in range(runs):
        key, is_decorated = f"run {number}", bool(number % 2)
        for left in reversed(range(_TRIES)):
            seconds = plan.cancels_at(_SECONDS, left=left) or None
            body = plan.body(key, left=left, is_decorated=is_decorated)
            try:
                async with asyncio.timeout(seconds):
                    answer = await (decorated if is_decorated else by_hand)(key, body)
            except _DISTURBED as error:
                counts[type(error).__name__] += 1
            else:
                counts["another result"] += answer != key
                break
        body = plan.body(key, left=0, is_decorated=False)
        counts["another result"] += await (decorated if is_decorated else by_hand)(key, body) != key
    await authority.aio.close()
    await engine.dispose()
    return counts + effects_of(url, runs)


def check(name: str, url: str, runs: int, seed: int) -> bool:
    """Run on one database, in both worlds and with the control; print counts; return if all is right."""
    right = True
    with tempfile.TemporaryDirectory() as folder, Database(f"sqlite:///{Path(folder) / 'leases'}") as locks:
        for is_control, in_loop in itertools.product((False, True), repeat=2):
            make_tables(url)
            began = time.monotonic()
            with _without_checks() if is_control else nullcontext():
                counts = (
                    asyncio.run(in_coroutines(url, runs, seed, locks))
                    if in_loop
                    else in_threads(url, runs, seed, locks)
                )
            title = "control, without the checks" if is_control else "among disturbances"
            world = "coroutines" if in_loop else "threads"
            seconds = time.monotonic() - began
            print(f"{name}, {title}, {world}: {dict(counts)} in {seconds:.0f} s", flush=True)
            exactly_once = counts["once"] == counts["total"] == runs and not counts["another result"]
            right &= counts["more than once"] > 0 if is_control else exactly_once
    return right


@contextmanager
def _without_checks() -> Iterator[None]:
    """Store the results without looking whether the receipt is there."""

    def store(connection: Connection, *_: Any) -> None:
        leases = open_leases(connection)
        for receipt in leases.receipts.values() if leases is not None else ():
            stored = {"its": receipt.key, "found": receipt.result}
            connection.execute(receipts._storing(receipts._table_of(connection)), stored)

    with (
        mock.patch.object(receipts, "_store_results", store),
        mock.patch.object(_fenced_once, "working", return_value=nullcontext()),
    ):
        yield
