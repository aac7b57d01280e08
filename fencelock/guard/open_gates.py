"""Which open transactions have passed which gates: two of one thread or task would wait for each other.

The database cannot see that deadlock, because one of its two waits is in the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from sqlalchemy import Engine
from sqlalchemy.engine import Connection, Transaction

from fencelock._owners import current_owner
from fencelock.errors import FenceError
from fencelock.guard.leases import Writing, writing_on

_at_gates: WeakKeyDictionary[Writing, None] = WeakKeyDictionary()
"""Those that have passed a gate; in no `WeakSet`, where one thread cannot look while another adds to it."""


def note_gate(connection: Connection, resource: str) -> None:
    """Note that the connection's transaction holds the resource's row of the fence table."""
    writing = writing_on(connection)
    writing.gates.add((resource, current_owner()))
    _at_gates[writing] = None


def passes_gate_here(resource: str) -> bool:
    """Tell whether an open transaction of this thread, task or greenlet has passed the gate of a resource."""
    return any(True for _ in _at_gate_here(resource))


def _at_gate_here(resource: str) -> Iterator[Transaction]:
    """Yield the open transactions of this thread, task or greenlet that have passed a resource's gate."""
    gate = resource, current_owner()
    for reference in _at_gates.keyrefs():
        writing = reference()
        transaction = None if writing is None else writing.transaction()
        if (
            writing is not None
            and transaction is not None
            and transaction.is_active
            and gate in writing.gates
        ):
            yield transaction


def refuse_to_wait_for_oneself(connection: Connection, resource: str) -> None:
    """Refuse a gate that another open transaction of this very thread, task or greenlet has passed.

    Raises:
        FenceError: the database would wait for that transaction, which cannot go on meanwhile.
    """
    for transaction in _at_gate_here(resource):
        other = transaction.connection
        if other is not connection and _is_same_database(other.engine, connection.engine):
            raise FenceError(
                f"another transaction of this thread, task or greenlet has passed the gate of {resource!r} "
                f"and is still open: this one would wait for it for ever. Work in its session, or end it"
            )


def _is_same_database(one: Engine, other: Engine) -> bool:
    # Each pool on a database in memory has one of its own.
    in_memory = one.url.database in {None, "", ":memory:"}
    return one.pool is other.pool or (one.url.set(query={}) == other.url.set(query={}) and not in_memory)
