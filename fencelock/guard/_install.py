"""Installs the guard, once, when a program first defines or uses something that needs it.

The guard replaces the private method by which UPDATE, DELETE and INSERT execute themselves. A listener for
executions would make every statement of every engine 4 to 30 % slower. The events of the dialect cost almost
nothing, and see textual SQL.
"""

from __future__ import annotations

from threading import Lock

from sqlalchemy import Column, Table, UpdateBase, event
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session

from fencelock.guard import leases, objects, sessions, statements, text, triggers
from fencelock.guard._sqlalchemy import execute_by, hear_ends, hear_merges, hear_rows, load_with
from fencelock.guard.tables import WRITE_COLUMN, note_column

_lock = Lock()
_installed = False


def install() -> None:
    """Guard all engines, mappers and sessions of this process, present and future."""
    global _installed  # noqa: PLW0603  SQLAlchemy's classes are global too
    with _lock:
        if _installed:
            return
        execute_by(UpdateBase, statements.guarding)
        hear_ends(leases.on_end)
        load_with(WRITE_COLUMN)
        hear_rows(WRITE_COLUMN, objects.on_row, objects.loading_in)
        hear_merges(WRITE_COLUMN, objects.on_merged)
        listen()
        _installed = True


def listen() -> None:
    for name in ("do_execute", "do_executemany", "do_execute_no_params"):
        event.listen(Engine, name, text.do_execute, insert=True)
    event.listen(Engine, "handle_error", triggers.explain)
    event.listen(Column, "after_parent_attach", note_column)
    event.listen(Session, "after_begin", sessions.on_begin)
    event.listen(Session, "after_soft_rollback", sessions.on_soft_rollback)
    event.listen(Session, "before_flush", objects.on_flush)
    event.listen(Session, "persistent_to_transient", objects.on_undone)
    event.listen(Session, "pending_to_transient", objects.on_undone)
    event.listen(Table, "after_create", triggers.after_create)
    event.listen(Table, "before_drop", triggers.before_drop)
