"""Which lost transactions may have been committed.

Apart from `endings` because only the driver's errors tell of a lost connection, and only a claim ends the
doubt.
"""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy.engine import Connection, ExceptionContext

from fencelock.guard.endings import is_watched
from fencelock.guard.leases import open_writer, writer_of
from fencelock.lease import Lease

_COMMITS_NOTHING: Final = re.compile(
    r"\s*(?:select|insert|update|delete|with|values|savepoint|release savepoint|rollback to)\b[^;]*;?\s*\Z",
    re.IGNORECASE,
)
"""Single statements that cannot end a transaction by COMMIT, as CALL, SET, and on MariaDB all DDL may."""


def doubt_lost_transaction(context: ExceptionContext) -> None:
    """Note that the connection of a transaction was lost, unless it is sure that nothing was committed.

    Where the network or the server ended it, nobody here can tell for sure what had been sent and what has
    arrived: that is in doubt, whatever statement has found it out. Where the program itself gave up waiting
    (a task was cancelled, or Ctrl-C pressed), it is known what it waited for: that is in doubt from the
    moment in which SQLAlchemy sets about the COMMIT, or PREPARE; with a statement that may itself commit (see
    `_COMMITS_NOTHING`); and where SQLAlchemy's transaction is of a class that is not watched. Else it is not,
    and the same token goes on: the connection is closed, and the server rolls back what nobody has asked it
    to commit. Until it notices, the lost transaction keeps its row locks, so that a claim waits for its end.
    """
    connection = context.connection
    writer = open_writer(connection) if context.is_disconnect and connection is not None else None
    if writer is None or connection is None:
        return
    given_up = not isinstance(context.original_exception, Exception)
    watched = is_watched(connection.get_transaction())
    sql = context.statement or getattr(context.execution_context, "statement", None)
    if not given_up or writer.committing or not watched or (sql and not _COMMITS_NOTHING.match(sql)):
        writer.doubt()


def take_doubted(connection: Connection, token: int) -> list[Lease]:
    """Return the leases in doubt that the transaction is about to claim under with this token."""
    claiming = writer_of(connection).claiming
    taken = [lease for lease in claiming if lease.fencing_token == token]
    claiming.difference_update(taken)
    return taken
