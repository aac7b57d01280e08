"""One addition, as an application would do it: claim, read, think, write, COMMIT; noted before and after."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fencelock.errors import FencelockError, StaleTokenError
from fencelock.guard import claim
from fencelock.torture.history import Outcome, Write
from fencelock.torture.journal import Journal
from fencelock.torture.plan import Plan
from fencelock.torture.table import Counter, PlainCounter


@dataclass(slots=True)
class _Addition:
    """What is known about one row's addition so far."""

    row: str
    token: int
    began: int
    read: int | None = None


class Storage:
    """Adds 1 to rows, under the leases that the current context holds.

    Args:
        engine: of the database.
        journal: where each addition is noted.
        worker: whose it is.
        guard: whether to use the fenced table.
        thinking: what surrounds the time between a read and its write.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        worker: int,
        *,
        guard: bool,
        thinking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._worker = worker
        self._guard = guard
        self._thinking = thinking

    def add(self, tokens: Mapping[str, int], plan: Plan) -> bool:
        """Add 1 to each of the rows, in one transaction.

        Args:
            tokens: of the leases, by the row.
            plan: how.

        Returns:
            Whether it is certain what came of it.
        """
        now = time.monotonic_ns()
        additions = [_Addition(row, tokens[row], now) for row in sorted(tokens)]
        with Session(self._engine, expire_on_commit=False) as session:
            try:
                self._read_and_write(session, additions, plan)
            except StaleTokenError as error:
                self._note_refusal(additions, error)
                return True
            except (FencelockError, DBAPIError) as error:
                self._note(additions, Outcome.FAILED, error)
                return True
            try:
                session.commit()
            except (FencelockError, DBAPIError) as error:
                lost = isinstance(error, DBAPIError) and error.connection_invalidated
                self._note(additions, Outcome.UNKNOWN if lost else Outcome.FAILED, error)
                return not lost
        self._note(additions, Outcome.ACKNOWLEDGED)
        return True

    def _read_and_write(self, session: Session, additions: list[_Addition], plan: Plan) -> None:
        rows = [self._take(session, addition.row) for addition in additions]
        if not plan.together:
            session.commit()  # what was claimed stays claimed: by the fence, no longer by the row's lock
        with self._thinking():
            time.sleep(plan.think)
        for row, addition in zip(rows, additions, strict=True):
            addition.read = row.value
            row.value += 1
            addition.began = time.monotonic_ns()
            self._journal.intend(self._write(addition, Outcome.UNKNOWN))
        session.flush()

    def _take(self, session: Session, row: str) -> Counter | PlainCounter:
        if self._guard:
            return claim(session, Counter, row)
        return session.get_one(PlainCounter, row)

    def _note_refusal(self, additions: list[_Addition], error: StaleTokenError) -> None:
        """Note that one row has refused, so that the others were not written either."""
        for addition in additions:
            refused = error.identity == (addition.row,)
            self._note([addition], Outcome.REFUSED if refused else Outcome.FAILED, error)

    def _note(self, additions: list[_Addition], outcome: Outcome, error: Exception | None = None) -> None:
        for addition in additions:
            self._journal.note(self._write(addition, outcome, error))

    def _write(self, addition: _Addition, outcome: Outcome, error: Exception | None = None) -> Write:
        return Write(
            self._worker,
            addition.row,
            addition.token,
            addition.began,
            time.monotonic_ns(),
            outcome,
            addition.read,
            "" if error is None else type(error).__name__,
        )
