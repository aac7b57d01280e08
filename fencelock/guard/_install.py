"""Puts the guard's listeners in place, once.

They listen to SQLAlchemy's `Engine` class, since a table does not know the engines that it will be used
with, and an engine that nobody has told the guard about must not be a way around it. A process that has
never defined a fenced table has no listener at all. Facades made by `engine.execution_options()` share their
parent's listeners, so no statement passes twice.

An engine that meets no fenced table pays for it all the same, because the only event in which a statement can
still be changed, or refused before anything has happened, is `before_execute`, and SQLAlchemy decides whether
it fires before anything about the statement is known. Whoever listened to single engines would have to know
in advance which of them meets a fenced table; the events of the cursor, which would find out, come too late
for the first write. So what is left is to have few listeners that leave early. The last look at a statement
is taken in `do_execute` and its sisters: they come after whatever other listeners make of the SQL, and cost
less than `before_cursor_execute`.
"""

from __future__ import annotations

from threading import Lock

from sqlalchemy import Column, event
from sqlalchemy.engine import Engine
from sqlalchemy.orm import Mapper

from fencelock.guard import refusal, rewrite, session, triggers
from fencelock.guard._mapping import on_any_mapped
from fencelock.guard._tables import note_column

_lock = Lock()
_installed = False


def install() -> None:
    """Listen to every engine, mapper and session of this process, those to come included."""
    global _installed  # noqa: PLW0603  SQLAlchemy's listeners are global too
    with _lock:
        if _installed:
            return
        event.listen(Engine, "before_execute", rewrite.before_execute, retval=True)
        event.listen(Engine, "after_execute", rewrite.after_execute)
        event.listen(Engine, "do_execute", refusal.do_execute, insert=True)
        event.listen(Engine, "do_executemany", refusal.do_execute, insert=True)
        event.listen(Engine, "do_execute_no_params", refusal.do_execute_no_params, insert=True)
        event.listen(Engine, "savepoint", session.note_savepoint)
        event.listen(Engine, "rollback_savepoint", session.note_rollback_to_savepoint)
        event.listen(Engine, "handle_error", session.doubt_lost_transaction)
        event.listen(Engine, "handle_error", refusal.explain_missing_column)
        event.listen(Engine, "handle_error", triggers.explain)
        event.listen(Column, "after_parent_attach", note_column)
        event.listen(Mapper, "after_mapper_constructed", on_any_mapped)
        session.watch_sessions()
        triggers.watch_tables()
        _installed = True
