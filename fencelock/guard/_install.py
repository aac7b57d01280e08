"""Puts the guard in place, once.

The ways of a write to the database are SQLAlchemy's classes, since a table does not know the engines that it
will be used with, and an engine that nobody has told the guard about must not be a way around it. A process
that has never defined a fenced table is left alone.

An engine that meets no fenced table shall not pay for one elsewhere, and one listener for the events of
`Engine` makes everything slower that any engine of the process does, be it called or not: 3% for a flush, 4%
for a SELECT, because each `Connection` then makes lists of listeners for all of its events. So the guard has
none. UPDATE, DELETE, INSERT and text are taken where they execute themselves, in `_execute_on_connection`,
which is what `Connection.execute` calls; SELECTs are not touched. It is no public method: that is one of the
reasons why the version of SQLAlchemy is capped, and what would come by another way is seen, and refused, in
the last look that is taken at every statement in `do_execute` and its sisters. These, and `handle_error`, are
events of the dialect, which cost nothing to speak of.
"""

from __future__ import annotations

from threading import Lock
from typing import Any, Final

from sqlalchemy import Column, StatementLambdaElement, TextClause, UpdateBase, event
from sqlalchemy.engine import Engine
from sqlalchemy.orm import FromStatement, Mapper, Session
from sqlalchemy.sql.lambdas import NullLambdaStatement

from fencelock.guard import (
    _missing,
    doubt,
    endings,
    flushes,
    objects,
    rewrite,
    sessions,
    text,
    triggers,
)
from fencelock.guard._sqlalchemy import execute_by, load_with
from fencelock.guard._tables import WRITE_COLUMN, note_column

_WRITING: Final[tuple[Any, ...]] = (
    UpdateBase,
    TextClause,
    FromStatement,
    StatementLambdaElement,
    NullLambdaStatement,
)
"""What may write to a table: the last three by what is inside."""

_lock = Lock()
_installed = False


def install() -> None:
    """Guard what every engine, mapper and session of this process does, those to come included."""
    global _installed  # noqa: PLW0603  SQLAlchemy's classes are global too
    with _lock:
        if _installed:
            return
        for kind in _WRITING:
            execute_by(kind, rewrite.guarding)
        load_with(WRITE_COLUMN)
        listen()
        _installed = True


def listen() -> None:
    """Listen to the events that the guard needs."""
    event.listen(Engine, "do_execute", text.do_execute, insert=True)
    event.listen(Engine, "do_executemany", text.do_execute, insert=True)
    event.listen(Engine, "do_execute_no_params", text.do_execute_no_params, insert=True)
    event.listen(Engine, "handle_error", doubt.doubt_lost_transaction)
    event.listen(Engine, "handle_error", _missing.explain)
    event.listen(Engine, "handle_error", triggers.explain)
    event.listen(Column, "after_parent_attach", note_column)
    event.listen(Mapper, "mapper_configured", flushes.watch_plans)
    event.listen(Session, "after_begin", sessions.on_begin)
    event.listen(Session, "after_soft_rollback", endings.on_rollback)
    event.listen(Session, "persistent_to_transient", objects.on_insert_undone)
    event.listen(Session, "pending_to_transient", objects.on_insert_undone)
    triggers.watch_tables()
