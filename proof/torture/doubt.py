"""COMMITs whose connection ends in the middle, one way or the other, on a PostgreSQL that is ours.

The database itself says which session is in the middle of a COMMIT, so nothing here is left to luck. A
deferred trigger that waits for an advisory lock can hold up a COMMIT before it takes place. A client whose
connection ends then has written nothing. A standby that does not exist can hold up a COMMIT after it has
taken place. A client whose connection ends then has written, and does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, NullPool, create_engine, text

from fencelock.guard.sessions import BYPASS

_LOCK = 0x7E7CE
#: Seconds between two looks at what a database does.
POLL = 0.01
_TRIGGER = f"""
CREATE OR REPLACE FUNCTION fencelock_torture_hold_up() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared({_LOCK}); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER fencelock_torture_hold_up AFTER UPDATE ON {{table}}
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fencelock_torture_hold_up()
"""
_HELD_UP = text(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'COMMIT%'"
    " AND state = 'active' AND wait_event = :event"
)
_END = text("SELECT pg_terminate_backend(:pid, 5000)")


class Doubt:
    """Holds up COMMITs and ends their connections, on a database that is ours: its settings are changed."""

    def __init__(self, url: str) -> None:
        engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._engine: Engine = engine.execution_options(
            fencelock=BYPASS
        )  # the trigger's text has UPDATE in it

    def prepare(self, tables: Iterable[str]) -> None:
        with self._engine.connect() as connection:
            for table in tables:
                connection.exec_driver_sql(_TRIGGER.format(table=table))

    def end_before(self, over: Callable[[], bool], seconds: float) -> int:
        """End connections that have not committed yet; return how many."""
        with self._engine.connect() as connection:
            connection.execute(text(f"SELECT pg_advisory_lock({_LOCK})"))
            try:
                return _end_those_held_up(connection, "advisory", over, seconds)
            finally:
                connection.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))

    def end_after(self, over: Callable[[], bool], seconds: float) -> int:
        with self._engine.connect() as connection, waiting_for_a_standby(connection):
            return _end_those_held_up(connection, "SyncRep", over, seconds)


@contextmanager
def waiting_for_a_standby(connection: Connection) -> Iterator[None]:
    """Have every COMMIT wait until a standby has it, which does not exist."""
    connection.execute(text("ALTER SYSTEM SET synchronous_standby_names = 'nobody'"))
    connection.execute(text("SELECT pg_reload_conf()"))
    try:
        yield
    finally:
        connection.execute(text("ALTER SYSTEM RESET synchronous_standby_names"))
        connection.execute(text("SELECT pg_reload_conf()"))


def _end_those_held_up(connection: Connection, event: str, over: Callable[[], bool], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        if pids := connection.scalars(_HELD_UP, {"event": event}).all():
            return sum(bool(connection.scalar(_END, {"pid": pid})) for pid in pids)
        time.sleep(POLL)
    return 0
