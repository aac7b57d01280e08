"""Ends connections over which a database grants leases, also on a database of the user's.

Only connections of the run are ended. On PostgreSQL they bear a name, and leases have other connections than
rows. MariaDB shows no name. There the run's connections are those that lead to a port of a worker, and
connections to rows end as well.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import psutil
from sqlalchemy import Connection, NullPool, bindparam, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from proof.torture.doubt import POLL, waiting_for_a_standby

#: Seconds to wait for a connection that is busy with a statement, and for one that has just committed.
_BUSY_SECONDS: Final = 0.2
_HELD_UP_SECONDS: Final = 1.0
_BACKENDS: Final = text(
    "SELECT pid, state = 'active', wait_event FROM pg_stat_activity"
    " WHERE application_name = :name AND datname = current_database() AND usename = current_user"
)
_PROCESSES: Final = text(
    "SELECT id, command = 'Query', host FROM information_schema.processlist"
    " WHERE db = DATABASE() AND user = SUBSTRING_INDEX(USER(), '@', 1)"
    " AND SUBSTRING_INDEX(host, ':', -1) IN :ports"
).bindparams(bindparam("ports", expanding=True))


class LeaseConnections:
    """The connections of the workers' authorities: those that were made with one of `urls` bear a name."""

    def __init__(self, urls: Sequence[str], *, ours: bool) -> None:
        made = [make_url(url) for url in urls]
        self._is_postgresql = made[0].get_backend_name() == "postgresql"
        self._name = f"fencelock-torture-{secrets.token_hex(4)}"
        self._holds_up = ours and self._is_postgresql
        self._engines = [create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT") for url in made]
        if self._is_postgresql:
            made = [url.update_query_dict({"application_name": self._name}) for url in made]
        self.urls = [url.render_as_string(hide_password=False) for url in made]

    def end(self, pids: Sequence[int], rng: random.Random, over: Callable[[], bool]) -> str:
        """End some of them, if possible in the middle of a statement; return what was ended, for a person.

        Raises:
            DBAPIError: the database did not answer.
        """
        with rng.choice(self._engines).connect() as connection:
            if self._holds_up and rng.random() < 1 / 2:
                with waiting_for_a_standby(connection):
                    ended = self._end_held_up(connection, over)
                return f"{ended} connections that had committed"
            return f"{self._end_some(connection, pids, rng)} connections"

    def _end_held_up(self, connection: Connection, over: Callable[[], bool]) -> int:
        """End connections whose statement has taken place, before they can say so."""
        deadline = time.monotonic() + _HELD_UP_SECONDS
        while not over() and time.monotonic() < deadline:
            found = connection.execute(_BACKENDS, {"name": self._name}).all()
            if held_up := [pid for pid, _, event in found if event == "SyncRep"]:
                return sum(self._ends(connection, pid) for pid in held_up)
            time.sleep(POLL)
        return 0

    def _end_some(self, connection: Connection, pids: Sequence[int], rng: random.Random) -> int:
        deadline = time.monotonic() + _BUSY_SECONDS
        chosen = self._found(connection, pids)
        if rng.random() < 1 / 2:
            while not any(chosen.values()) and time.monotonic() < deadline:
                chosen = self._found(connection, pids)
            chosen = {number: busy for number, busy in chosen.items() if busy} or chosen
        some = rng.sample(list(chosen), rng.randint(1, len(chosen))) if chosen else []
        return sum(self._ends(connection, number) for number in some)

    def _found(self, connection: Connection, pids: Sequence[int]) -> dict[int, bool]:
        if self._is_postgresql:
            rows = connection.execute(_BACKENDS, {"name": self._name}).all()
        else:
            ports = [str(port) for pid in pids for port in _ports(pid)]
            rows = connection.execute(_PROCESSES, {"ports": ports}).all()
        return {row[0]: bool(row[1]) for row in rows}

    def _ends(self, connection: Connection, number: int) -> bool:
        if self._is_postgresql:
            return bool(connection.scalar(text("SELECT pg_terminate_backend(:number)"), {"number": number}))
        try:
            connection.exec_driver_sql(f"KILL {number:d}")
        except DBAPIError:  # it has ended by itself
            return False
        return True


def _ports(pid: int) -> list[int]:
    with suppress(psutil.Error):
        return [each.laddr.port for each in psutil.Process(pid).net_connections("tcp")]
    return []
