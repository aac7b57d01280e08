"""Which of a session's databases a claim, a gate or an upsert goes to: the one that a write would go to.

A `get_bind` of the application's may send reads to a follower, or each row to a shard of its own. What a
claim reads has to come from where it has claimed, so `get_bind` is given an UPDATE for the reads too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Mapper, Session

from fencelock.guard.leases import Tokens, begin_writing
from fencelock.guard.sessions import join, refuse_bypass
from fencelock.guard.tables import FencedTable, fenced_table


@dataclass(frozen=True, slots=True)
class Target:
    """Where a session writes; `bind_arguments` are those of the queries that it sends there."""

    session: Session
    connection: Connection
    bind_arguments: dict[str, Any]

    @property
    def shard(self) -> object:
        """Which one, of a `ShardedSession`; else None."""
        return self.bind_arguments.get("shard_id")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Have the session read from where it writes, what it loads eagerly as well."""
        session, chosen_by = self.session, self.session.get_bind
        if self.shard is not None or chosen_by == Session.get_bind.__get__(session):
            yield
            return

        def as_a_write(mapper: Any = None, **arguments: Any) -> Any:
            if mapper is not None:
                arguments["clause"] = update(_written_table(mapper.mapper))
            return chosen_by(mapper=mapper, **arguments)

        before = {name: own for name, own in vars(session).items() if name == "get_bind"}
        vars(session)["get_bind"] = as_a_write
        try:
            yield
        finally:
            del vars(session)["get_bind"]
            vars(session).update(before)


def target_of(
    session: Session,
    written: Mapper[Any] | Table,
    bind_arguments: Mapping[str, Any] | None = None,
    identities: Iterable[tuple[Any, ...]] = (),
) -> Target:
    """Return where a session writes rows of a model or a table.

    The primary keys of the rows tell a `ShardedSession` the shard; TypeError says that it cannot be told.
    """
    own = dict(bind_arguments or {})
    if isinstance(written, Mapper):
        arguments = {"mapper": written, "clause": update(_written_table(written)), **own}
    else:
        arguments = {"clause": update(written), **own}
    if isinstance(session, ShardedSession) and "shard_id" not in own:
        own["shard_id"] = _shard_of(session, arguments.get("mapper"), identities)
    try:
        connection = session.connection(bind_arguments={**arguments, **own})
    except UnboundExecutionError as error:
        raise TypeError(
            "this session has no one database, for instance because of binds=: say which, with "
            "bind_arguments={'mapper': <a model of the same database>}"
        ) from error
    join(connection, session)
    return Target(session, connection, own)


def _written_table(mapper: Mapper[Any]) -> Table:
    """Return the table of a model that has the fence; or the first, of a model without one."""
    tables = [table for table in mapper.tables if isinstance(table, Table)]
    return next(filter(fenced_table, tables), tables[0])


def _shard_of(session: ShardedSession, mapper: Any, identities: Iterable[tuple[Any, ...]]) -> object:
    shards = set()
    for identity in identities:
        shards.update(
            session.identity_chooser(
                mapper, identity, lazy_loaded_from=None, execution_options={}, bind_arguments={}
            )
        )
    if len(shards) != 1:
        found = f", and these rows may be in {', '.join(sorted(map(str, shards)))}" if shards else ""
        raise TypeError(
            f"this session has several shards{found}: say which, bind_arguments={{'shard_id': …}}"
        )
    return shards.pop()


def begin_claim(
    session: Session,
    written: Mapper[Any] | Table,
    bind_arguments: Mapping[str, Any] | None,
    identities: Sequence[tuple[Any, ...]] = (),
) -> Target:
    """Flush, and return where the session writes; refuse what a claim would overwrite, or could not guard."""
    if session.autoflush:
        session.flush()
    if isinstance(written, Mapper):
        model = written.base_mapper.class_
        if any(isinstance(changed, model) for changed in session.dirty):
            raise InvalidRequestError(
                f"the session has changes of {model.__name__} that a claim could overwrite; claim it before "
                f"changing it, or flush first"
            )
    target = target_of(session, written, bind_arguments, identities)
    refuse_bypass(target.connection.get_execution_options(), target.connection)
    return target


def tokens_to_claim(connection: Connection, fenced: FencedTable) -> Tokens:
    """Return the tokens to claim with; refuse a connection that commits each statement by itself."""
    begin_writing(connection, connection.get_execution_options(), fenced)
    return Tokens(connection, fenced, claiming=True)
