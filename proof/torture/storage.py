"""One addition, as an application would do it: read, think, write, COMMIT; noted before and after.

Some think between the write and its COMMIT instead. How the reader comes by what it
writes back is its style (`history.Style`). Blocking code and coroutines take the same steps, each with a
session of its own kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from fencelock._databases import error_number
from fencelock._generators import Call, Steps
from fencelock.errors import FencelockError, StaleTokenError
from fencelock.guard import claim, gate
from proof.torture.history import Outcome, Style, Write
from proof.torture.journal import Journal
from proof.torture.plan import Plan
from proof.torture.steps import run, run_in_task, sleep
from proof.torture.table import Counter, PlainCounter, VersionedCounter, name_of_versioned

#: A node of Galera that has left its group does not know what has become of a COMMIT.
_LEFT_ITS_GROUP: Final = 1180
_Object = Counter | VersionedCounter | PlainCounter


@dataclass(frozen=True, slots=True)
class Kept:
    """An object in no session, and what was loaded into it, whatever becomes of the object."""

    counter: Counter
    read: int
    fence: int
    read_at: int


@dataclass(slots=True)
class _Addition:
    row: str
    token: int
    style: Style
    began: int
    read_at: int
    read: int | None = None
    fence: int | None = None


class Storage:
    """Adds 1 to rows, under the leases that the current context holds."""

    def __init__(
        self,
        engine: Engine,
        async_engine: AsyncEngine | None,
        journal: Journal,
        worker: int,
        *,
        guard: bool,
        thinking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._async_engine = async_engine
        self._journal = journal
        self._worker = worker
        self._guard = guard
        self._thinking = thinking

    def read_before(self, plan: Plan) -> Call:
        """Return objects of the rows, for a worker that is yet to ask for their lock; none if that fails."""
        return Call(partial(self._read_before, plan), partial(asyncio.to_thread, self._read_before, plan))

    def _read_before(self, plan: Plan) -> dict[str, Kept]:
        if not plan.writes or plan.style is not Style.BEFORE or not self._guard:
            return {}
        now = time.monotonic_ns()
        try:
            with Session(self._engine) as session:
                counters = {row: session.get_one(Counter, row) for row in plan.resources}
                return {
                    row: Kept(each, each.value, each.last_fencing_token, now)
                    for row, each in counters.items()
                }
        except DBAPIError:
            return {}

    def add(self, tokens: Mapping[str, int], plan: Plan, before: Mapping[str, Kept]) -> Call:
        """Add 1 to each of the rows in one transaction; return whether it is certain what came of it."""
        blocking = partial(self._add_blocking, tokens, plan, before)
        if self._async_engine is None:
            return Call(blocking, partial(asyncio.to_thread, blocking))
        return Call(blocking, partial(self._add_in_task, self._async_engine, tokens, plan, before))

    def _add_blocking(self, tokens: Mapping[str, int], plan: Plan, before: Mapping[str, Kept]) -> bool:
        additions = self._begin(tokens, plan, before)
        # Closing the session fails where its connection was ended behind the COMMIT.
        with suppress(DBAPIError), Session(self._engine, expire_on_commit=False) as session:
            certain = run(self._add(session, additions, plan, before))
        return certain

    async def _add_in_task(
        self, engine: AsyncEngine, tokens: Mapping[str, int], plan: Plan, before: Mapping[str, Kept]
    ) -> bool:
        additions = self._begin(tokens, plan, before)
        with suppress(DBAPIError):
            async with AsyncSession(engine, expire_on_commit=False) as session:
                certain = await run_in_task(self._add(session, additions, plan, before))
        return certain

    def _add(
        self,
        session: Session | AsyncSession,
        additions: list[_Addition],
        plan: Plan,
        before: Mapping[str, Kept],
    ) -> Steps[bool]:
        commit: Any = session.commit
        try:
            counters = yield _within(session, self._read, additions, plan, before)
            if not plan.together:
                yield Call(commit, commit)  # a claim stays: by the fence, no longer by the row's lock
            if plan.late:
                yield _within(session, self._write, counters, additions)
            with self._thinking():
                yield sleep(plan.think)
            if not plan.late:
                yield _within(session, self._write, counters, additions)
        except (FencelockError, StaleDataError, DBAPIError) as error:
            return self._note_failure(additions, error)
        try:
            yield Call(commit, commit)
        except (FencelockError, DBAPIError) as error:
            return self._note_commit(additions, error)
        return self._note_commit(additions)

    def _begin(self, tokens: Mapping[str, int], plan: Plan, before: Mapping[str, Kept]) -> list[_Addition]:
        now = time.monotonic_ns()
        style = Style.GET if plan.style is Style.BEFORE and not before else plan.style
        return [
            _Addition(row, tokens[row], style, now, before[row].read_at if before else now)
            for row in sorted(tokens)
        ]

    def _read(
        self, session: Session, additions: list[_Addition], plan: Plan, before: Mapping[str, Kept]
    ) -> list[_Object | int]:
        found = [self._take(session, each, plan, before) for each in additions]
        for addition, counter in zip(additions, found, strict=True):
            if addition.style is Style.BEFORE:
                addition.read, addition.fence = before[addition.row].read, before[addition.row].fence
                continue
            addition.read = counter if isinstance(counter, int) else counter.value
            addition.fence = getattr(counter, "last_fencing_token", None)
        return found

    def _take(  # noqa: PLR0911 - a table, in effect
        self, session: Session, addition: _Addition, plan: Plan, before: Mapping[str, Kept]
    ) -> _Object | int:
        row = addition.row
        if not self._guard:
            return session.get_one(PlainCounter, row)
        match addition.style:
            case Style.CLAIM:
                return claim(session, Counter, row)
            case Style.GATE:
                gate(session, row)
                return session.get_one(Counter, row)
            case Style.GET:
                return session.get_one(Counter, row)
            case Style.BEFORE:
                kept = before[row].counter
                if plan.together:
                    return session.merge(kept)
                session.add(kept)
                return kept
            case Style.VERSIONED:
                return session.get_one(VersionedCounter, row)
            case Style.CORE:
                return session.execute(select(Counter.value).where(Counter.name == row)).scalar_one()

    def _write(self, session: Session, counters: list[_Object | int], additions: list[_Addition]) -> None:
        for addition in additions:
            addition.began = time.monotonic_ns()
            self._journal.intend(self._record(addition, Outcome.UNKNOWN))
        for counter, addition in zip(counters, additions, strict=True):
            if isinstance(counter, int):
                statement = update(Counter).where(Counter.name == addition.row).values(value=counter + 1)
                session.execute(statement, execution_options={"synchronize_session": False})
            else:
                counter.value += 1
        session.flush()

    def _note_failure(self, additions: list[_Addition], error: Exception) -> bool:
        """Note what was not written. Where one row has refused, the others were not written either."""
        for addition in additions:
            refused = isinstance(error, StaleDataError) or (
                isinstance(error, StaleTokenError) and error.identity == (addition.row,)
            )
            self._note([addition], Outcome.REFUSED if refused else Outcome.FAILED, error)
        return True

    def _note_commit(self, additions: list[_Addition], error: Exception | None = None) -> bool:
        lost = isinstance(error, DBAPIError) and (
            error.connection_invalidated or error_number(error) == _LEFT_ITS_GROUP
        )
        outcome = Outcome.ACKNOWLEDGED if error is None else Outcome.UNKNOWN if lost else Outcome.FAILED
        self._note(additions, outcome, error)
        return not lost

    def _note(self, additions: list[_Addition], outcome: Outcome, error: Exception | None = None) -> None:
        for addition in additions:
            self._journal.note(self._record(addition, outcome, error))

    def _record(self, addition: _Addition, outcome: Outcome, error: Exception | None = None) -> Write:
        row = addition.row if addition.style is not Style.VERSIONED else name_of_versioned(addition.row)
        return Write(
            self._worker,
            row,
            addition.token,
            addition.began,
            time.monotonic_ns(),
            outcome,
            addition.read,
            "" if error is None else type(error).__name__,
            addition.style,
            addition.fence,
            addition.read_at,
        )


def _within(session: Any, action: Callable[..., Any], *arguments: Any) -> Call:
    blocking = partial(action, session, *arguments)
    return Call(blocking, lambda: session.run_sync(action, *arguments))
