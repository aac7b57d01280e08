"""Sends a claim, gate, upsert or receipt to the database in which the session would write the rows.

The application's `get_bind` may send reads to a follower, or each row to its shard. A claim must read from
the database in which it has claimed. If its SELECT would read from another database, the claim is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Select, Table, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Mapper, Session

from fencelock.errors import FenceError
from fencelock.guard.leases import TokenLookup, refuse_autocommit
from fencelock.guard.sessions import join, refuse_bypass
from fencelock.guard.tables import FencedTable


class Target(NamedTuple):
    """The connection on which a session writes; `bind_arguments` lead its queries to the same database."""

    session: Session
    connection: Connection
    bind_arguments: dict[str, Any]

    def check_reads(self, query: Select[Any]) -> None:
        if isinstance(self.session, ShardedSession):
            return
        mapper = query.column_descriptions[0]["entity"]
        reads = self.session.get_bind(**{**self.bind_arguments, "mapper": mapper, "clause": query})
        if reads.engine is not self.connection.engine:
            raise FenceError(
                f"a claim reads what it has claimed, and get_bind() of this session sends its SELECT to "
                f"{reads.engine!r}, not to {self.connection.engine!r}: claim in a session that reads where "
                f"it writes, such as Session(engine)"
            )


def target_of(
    session: Session,
    table: Table,
    mapper: Mapper[Any] | None,
    bind_arguments: Mapping[str, Any] | None,
    identities: Iterable[tuple[Any, ...]],
) -> Target:
    """Return the target of a write to these rows. A `ShardedSession` chooses the shard by their keys."""
    arguments: dict[str, Any] = {"mapper": mapper, "clause": update(table), **(bind_arguments or {})}
    if isinstance(session, ShardedSession) and "shard_id" not in arguments:
        arguments["shard_id"] = _shard_of(session, arguments["mapper"], identities)
    try:
        connection = session.connection(bind_arguments={**arguments})
    except UnboundExecutionError as error:
        raise TypeError(
            "it is unclear which database of this session is meant, for example because of binds=: name it "
            "with bind_arguments={'mapper': <a model of the same database>}"
        ) from error
    join(connection, session)
    return Target(session, connection, arguments)


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
            f"this session has several shards{found}: name one with bind_arguments={{'shard_id': …}}"
        )
    return shards.pop()


def begin_claim(
    session: Session,
    table: Table,
    mapper: Mapper[Any] | None,
    bind_arguments: Mapping[str, Any] | None,
    identities: Sequence[tuple[Any, ...]] = (),
) -> Target:
    """Flush the session if it has autoflush, and return the target of its claim.

    Changes that the claim could overwrite are refused, and so is a connection that bypasses the guard.
    """
    if session.autoflush:
        session.flush()
    model: Any = None if mapper is None else mapper.base_mapper.class_
    if model is not None and any(isinstance(changed, model) for changed in session.dirty):
        raise InvalidRequestError(
            f"the session has changes of {model.__name__} that a claim could overwrite; claim it before "
            f"changing it, or flush first"
        )
    target = target_of(session, table, mapper, bind_arguments, identities)
    refuse_bypass(target.connection.get_execution_options(), target.connection)
    return target


def tokens_to_claim(connection: Connection, fenced: FencedTable) -> TokenLookup:
    """Return the tokens to claim with; refuse a connection that commits after each statement."""
    tokens = TokenLookup(connection, fenced, claiming=True)
    refuse_autocommit(tokens.leases, connection, connection.get_execution_options(), fenced.name)
    return tokens
