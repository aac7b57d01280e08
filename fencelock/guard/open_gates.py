"""Which open transactions have passed which gates: two of one thread or task would wait for each other.

The database cannot see that deadlock, because one of its two waits is in the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Engine
from sqlalchemy.engine import Connection, Transaction

from fencelock._owners import current_owner
from fencelock.errors import FenceError
from fencelock.guard.leases import Writer, writer_of
from fencelock.lease import Lease

_at_gates: WeakKeyDictionary[Writer, None] = WeakKeyDictionary()
"""Those that have passed a gate; in no `WeakSet`, where one thread cannot look while another adds to it."""


def note_gate(connection: Connection, resource: str) -> None:
    """Note that the connection's transaction holds the resource's row of the fence table."""
    writer = writer_of(connection)
    writer.gates.add((resource, current_owner()))
    _at_gates[writer] = None


def passes_gate_here(resource: str) -> bool:
    """Tell whether an open transaction of this thread, task or greenlet has passed the gate of a resource."""
    return any(True for _ in _at_gate_here(resource))


def _at_gate_here(resource: str) -> Iterator[tuple[Writer, Transaction]]:
    """Yield the open transactions of this thread, task or greenlet that have passed a resource's gate."""
    gate = resource, current_owner()
    for reference in _at_gates.keyrefs():
        writer = reference()
        transaction = None if writer is None else writer.transaction()
        if writer is not None and transaction is not None and transaction.is_active and gate in writer.gates:
            yield writer, transaction


def _at_gate_elsewhere(connection: Connection, resource: str) -> Iterator[Writer]:
    """Yield what those of them write under that are in the same database, on other connections."""
    for writer, transaction in _at_gate_here(resource):
        other = transaction.connection
        if other is not connection and _is_same_database(other.engine, connection.engine):
            yield writer


def refuse_beside_gate(connection: Connection, resource: str, lease: Lease) -> None:
    """Refuse to write under a lease with whose gate another transaction of this very owner is open.

    That one would write what it has read over this, and the fence, which is the lease's own, would not tell.

    Raises:
        FenceError: if there is one, in the same database.
    """
    elsewhere = _at_gate_elsewhere(connection, resource) if _at_gates else ()
    if any(writer.remembered.get(resource) is lease for writer in elsewhere):
        raise FenceError(
            f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} and "
            f"is still open: what it has read, it may write over this. Work in its session, or end it first"
        )


def refuse_to_wait_for_oneself(connection: Connection, resource: str) -> None:
    """Refuse a gate that another open transaction of this very thread, task or greenlet has passed.

    Raises:
        FenceError: the database would wait for that transaction, which cannot go on meanwhile.
    """
    if any(True for _ in _at_gate_elsewhere(connection, resource)):
        raise FenceError(
            f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} and "
            f"is still open: this one would wait for it for ever. Work in its session, or end it first"
        )


def _is_same_database(one: Engine, other: Engine) -> bool:
    def place(url: URL) -> tuple[Any, ...]:
        return url.get_backend_name(), url.host, url.port, url.database

    # Each pool on a database in memory has one of its own.
    in_memory = one.url.database in {None, "", ":memory:"}
    return one.pool is other.pool or (place(one.url) == place(other.url) and not in_memory)
