"""What listens to the statements of the guard's tests, and threads that wait for each other's locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine, event

from tests.immediate import begin_immediate


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., object], **options: Any) -> Iterator[None]:
    event.listen(target, name, listener, **options)
    try:
        yield
    finally:
        event.remove(target, name, listener)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    sent: list[str] = []
    with listening(engine, "before_cursor_execute", lambda *given: sent.append(given[2])):
        yield sent


def words(sent: list[str]) -> list[str]:
    return [statement.split(maxsplit=1)[0] for statement in sent]


def in_thread(work: Callable[[], object]) -> Callable[[], Any]:
    """Start work in a thread; return what waits for its result or raises its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001  handed over to the caller
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(30)
        assert not thread.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wait


def let_wait(engine: Engine) -> None:
    """Have SQLite's transactions wait for each other, as row locks have those of the others wait."""
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
        engine.dispose()


_WAITING = {
    "postgresql": "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": (
        "FROM information_schema.innodb_trx JOIN information_schema.processlist ON id = trx_mysql_thread_id"
        " WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'"
    ),
}


def until_one_waits(engine: Engine) -> None:
    """Return once a transaction waits for a lock of another; at once on SQLite, which does not tell.

    InnoDB shows the same as before to a connection that asks again within 0.1 s.
    """
    if (where := _WAITING.get(engine.dialect.name)) is None:
        return
    end = time.monotonic() + 30
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(sa.text(f"SELECT count(*) {where}")):
            assert time.monotonic() < end
            time.sleep(0.15)
