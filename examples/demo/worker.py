"""A worker process of the demo: does what its director says, one line of JSON at a time.

Run as `python -m demo.worker DATABASE`. The director decides only the order of the
steps; what each step does is what an application would do.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import create_engine, event, update
from sqlalchemy.orm import Session

import fencelock
from demo.models import ACCOUNT, RESOURCE, Account, PlainAccount
from fencelock.guard import claim, conditional_update


class Worker:
    """The steps that a worker can be told to take."""

    def __init__(self, database: str) -> None:
        self._engine = create_engine(database)
        self._authority = fencelock.configure(database)
        self._session = Session(self._engine, expire_on_commit=False)
        self._account: Account | None = None

    def lock_with(self, url: str) -> None:
        """Have another authority grant the leases."""
        self._authority = fencelock.configure(url)

    def lock(self, ttl: float) -> int:
        """Take the lock, and return the fencing token."""
        self._lock = self._authority.lock(RESOURCE, ttl=ttl, timeout=20, renew=False)
        return self._lock.acquire().token

    def unlock(self) -> str:
        """Release the lock."""
        try:
            self._lock.release()
        except fencelock.LockLostError:
            return "hears on leaving that its lease had ended: LockLostError"
        return "is done with the lock"

    # In an ordinary table.

    def read_plainly(self) -> int:
        """Read the balance."""
        with Session(self._engine) as session:
            return session.get_one(PlainAccount, ACCOUNT).balance

    def write_plainly(self, balance: int) -> int:
        """Write the balance, as computed from what was read."""
        with Session(self._engine) as session:
            session.execute(update(PlainAccount).where(PlainAccount.id == ACCOUNT).values(balance=balance))
            session.commit()
        return balance

    # In a fenced table.

    def claim(self) -> int:
        """Raise the fence to our token and read the balance, in one short transaction."""
        self._account = claim(self._session, Account, ACCOUNT)
        self._session.commit()
        return self._account.balance

    def write_with_orm(self, balance: int) -> int:
        """Write the balance through the unit of work."""
        assert self._account is not None  # noqa: S101 - the story claims first
        try:
            self._account.balance = balance
            self._session.commit()
        finally:
            self._session.rollback()
        return balance

    def write_slowly(self, balance: int, seconds: float) -> int:
        """Write the balance through the unit of work, over a network that takes so long."""
        arrives = time.monotonic() + seconds

        def travel(*_: object) -> None:
            while (left := arrives - time.monotonic()) > 0:
                time.sleep(left)

        event.listen(self._engine, "before_cursor_execute", travel)
        try:
            return self.write_with_orm(balance)
        finally:
            event.remove(self._engine, "before_cursor_execute", travel)

    def write_with_core(self, balance: int) -> int:
        """Write the balance with a Core statement."""
        statement = update(Account).where(Account.id == ACCOUNT).values(balance=balance)
        with self._engine.begin() as connection:
            connection.execute(statement, execution_options={"fencing_token": self._lock.lease.token})
        return balance

    def write_with_cursor(self, balance: int) -> int:
        """Write the balance with a bare DB-API cursor, and return how many rows the database let through."""
        connection = self._engine.raw_connection()
        sql, parameters = conditional_update(
            Account.__tablename__,
            {"balance": balance},
            {"id": ACCOUNT},
            self._lock.lease.token,
            paramstyle=self._engine.dialect.paramstyle,
        )
        cursor = connection.cursor()
        cursor.execute(sql, parameters)
        rows = cursor.rowcount
        connection.commit()
        connection.close()
        return rows

    def add(self, amount: int) -> int:
        """Do the whole job the way an application does, and return the new balance."""
        with self._authority.lock(RESOURCE), Session(self._engine) as session:
            account = claim(session, Account, ACCOUNT)
            account.balance += amount
            balance = account.balance
            session.commit()
        return balance


def _serve(worker: Worker) -> None:
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        step: Callable[..., Any] = getattr(worker, order["step"])
        try:
            answer: dict[str, Any] = {"value": step(*order["arguments"])}
        except fencelock.StaleTokenError as error:
            answer = {"stale": [error.token, error.current]}
        except Exception as error:  # noqa: BLE001 - whatever went wrong is the director's to judge
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({**answer, "at": time.monotonic()}), flush=True)


if __name__ == "__main__":
    logging.getLogger("fencelock").setLevel(logging.ERROR)  # the story tells of a lease that ended
    _serve(Worker(sys.argv[1]))
