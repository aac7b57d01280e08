"""What one flush has found out, for the statements that it executes: tokens, and loaded write ids.

SQLAlchemy makes statements of objects long after their events. This room brings them together again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm.base import NO_VALUE

from fencelock.guard._bypass import is_bypassed
from fencelock.guard._sqlalchemy import (
    cache_of,
    executes_flush,
    is_flushing,
    key_in_table,
    parameter_of,
    processors_of,
)
from fencelock.guard._tables import WRITE_COLUMN, FencedTable
from fencelock.guard.leases import Writer
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.sessions import join, owner_of, sessions_on
from fencelock.guard.write_ids import MIXED, new_write_id

if TYPE_CHECKING:
    from sqlalchemy.orm import InstanceState, UOWTransaction

_mappers: WeakKeyDictionary[Table, WeakSet[Mapper[Any]]] = WeakKeyDictionary()
"""Of each fenced table, the mappers of all classes whose objects have rows there."""

_numbers: Final = count()

under_way: dict[int, Flush] = {}
"""Those that write fenced rows, by the number that a session has and its objects know.

This is asked for each object of a flush. SQLAlchemy has no event for every end of a flush, which may come to
nothing, or fail in another listener; but its plan is thrown away then, and what is here goes with it.
"""


class LoadedIds(dict[Any, int | None]):
    """By primary key, the write ids that objects were loaded with whose rows of a table one flush writes.

    A key is the value of its one column, or a tuple of several, as `itemgetter` gives them. None where it is
    not known. Of an object that the flush has replaced by a new one with its key (a row switch), or that only
    a relationship with `post_update` writes, nobody has told; the session has it.

    Attributes:
        moved: those of objects whose key has changed, by the new one. Their rows have it already where a
            cascade of the database has been there before; else it may be another row's still.
    """

    __slots__ = ("_fenced", "_flush", "moved")

    def __init__(self, flush: Flush, fenced: FencedTable) -> None:
        self._flush = flush
        self._fenced = fenced
        self.moved: dict[Any, int | None] = {}

    def note(self, key: Any, loaded: int | None) -> None:
        """Note the write id of an object; one that no row has, should there be two of one row."""
        other = self.get(key)
        if other == self._flush.write_id:
            return  # a statement of this very flush has written the row
        self[key] = loaded if other in {None, loaded} else other if loaded is None else MIXED

    def __missing__(self, key: Any) -> int | None:
        for mapper in _mappers.get(self._fenced.table, ()):
            identity = key if len(mapper.primary_key) > 1 else (key,)
            for state in self._flush.objects_of(mapper, identity):
                if self._fenced.table in state.mapper.tables:
                    return None if state in self._flush.stamped else loaded_id(state.dict)
        return self.moved.get(key)


class Flush:
    """What one flush has found out so far.

    Attributes:
        number: a larger one than those of all that have begun before.
        plan: returns the plan of the unit of work; None once that is thrown away, or where none was noted.
        stamped: the objects whose fenced rows it writes, save those it deletes.
        write_id: of its writes.
        found: what `tokens` has returned so far, by table and connection.
        known: by table and primary key, the template's values of rows about to be written.
        unsaved: new objects, for tables whose resources cannot be told from the key alone.
    """

    __slots__ = ("_session", "_shards", "found", "known", "number", "plan", "stamped", "unsaved", "write_id")

    def __init__(self, session: Session, plan: UOWTransaction | None = None) -> None:
        self._session = ref(session)
        self.number = next(_numbers)
        self.plan = (lambda: None) if plan is None else ref(plan, partial(_forget_flush, session.hash_key))
        self.stamped: set[InstanceState[Any]] = set()
        self.write_id = new_write_id()
        self.found: dict[tuple[FencedTable, Connection], Tokens | None] = {}
        self.known: dict[FencedTable, dict[tuple[Any, ...], tuple[Any, ...]]] = {}
        self.unsaved: list[InstanceState[Any]] = []
        self._shards: set[Any] | None = None

    def tokens(self, fenced: FencedTable, connection: Connection) -> Tokens | None:
        """Return the tokens for rows of a table, or None where the connection bypasses the guard."""
        key = fenced, connection
        tokens = self.found.get(key)
        if tokens is None and key not in self.found:
            session = self._session()
            if session is not None:
                join(connection, session)  # another one may have joined the transaction since
            options = connection.get_execution_options()
            tokens = None if is_bypassed(options, connection) else Tokens(connection, fenced, options)
            if tokens is not None and session is not None:
                tokens.loaded, tokens.write_id = LoadedIds(self, fenced), self.write_id
            self.found[key] = tokens
        return tokens

    def objects_of(self, mapper: Mapper[Any], identity: tuple[Any, ...]) -> Iterator[InstanceState[Any]]:
        """Yield the objects that the session has of a row, of whichever shards the flush writes to."""
        session, plan = self._session(), self.plan()
        if self._shards is None:
            states: Iterable[InstanceState[Any]] = () if plan is None else plan.states
            self._shards = {None, *(state.identity_token for state in states)}
        for shard in self._shards:
            key = mapper.identity_key_from_primary_key(identity, identity_token=shard)
            instance = None if session is None else session.identity_map.get(key)
            if instance is not None:
                yield inspect(instance)

    def writes(self, session: Session, mapper: Mapper[Any], identity: tuple[Any, ...]) -> bool:
        """Tell whether the fenced row with this primary key is written or deleted."""
        plan: Any = self.plan()
        if plan is None or not plan.transaction.is_active:  # an earlier one, which somebody has kept
            return False
        instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
        if instance is not None:
            state = inspect(instance)
            deleted, only_listed = plan.states.get(state, (False, True))
            if state in self.stamped or (deleted and not only_listed):
                return True
        keys = (mapper.primary_key_from_instance(state.obj()) for state in self.stamped)
        return identity in map(tuple, keys)  # a new object, or one with a new key


def flush_of(state: InstanceState[Any]) -> Flush:
    """Return the flush that an object is part of.

    Should its plan not have been noted, it is one for this object alone: its row is guarded as any other, and
    what cannot be told without the plan is refused.
    """
    flush = under_way.get(state.session_id)  # type: ignore[arg-type]  # it has a session
    if flush is not None:
        return flush
    session = state.session
    assert session is not None  # noqa: S101  an object that is being flushed has one
    return Flush(session)


def _executing(connection: Connection) -> Flush | None:
    """Return the flush that is executing its statements on a connection.

    Of several it is the one that began last: in a listener of the other, in another session.
    """
    executing = [
        flush
        for session in sessions_on(connection)
        if executes_flush(session) and (flush := under_way.get(session.hash_key)) is not None
    ]
    if len(executing) > 1:
        return max(executing, key=operator.attrgetter("number"))
    return executing[0] if executing else None


def _forget_flush(number: int, gone: object) -> None:
    flush = under_way.get(number)
    if flush is not None and flush.plan is gone:
        del under_way[number]


class _NotePlans:
    """Notes the plan of a flush when the first object of a mapper goes in, as one of its processors.

    The mapper's events do not tell the plan, and a session's `before_flush` has every flush of the process
    look through its objects once more.
    """

    def per_property_preprocessors(self, plan: UOWTransaction) -> None:
        number = plan.session.hash_key
        flush = under_way.get(number)
        if flush is None or flush.plan() is not plan:  # an earlier one's, whose plan somebody has kept
            under_way[number] = Flush(plan.session, plan)


_note_plans: Final = _NotePlans()


def note_mapper(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Note that objects of a mapper have rows in a fenced table."""
    _mappers.setdefault(fenced.table, WeakSet()).add(mapper)


def note_plans_of(mapper: Mapper[Any]) -> None:
    """Note the plans of flushes that write objects of a mapper, though it may not be fenced."""
    processors_of(mapper).append(_note_plans)
    watch_plans(mapper, None)


def watch_plans(mapper: Mapper[Any], _model: object) -> None:
    """Note the plan whichever mapper of a fenced one's hierarchy comes first: a listener for all mappers.

    SQLAlchemy may look for objects of a whole hierarchy when one of any of its mappers goes in, and has then
    no use for the processors of the others any more.
    """
    hierarchy = mapper.base_mapper.self_and_descendants
    processors = [processors_of(each) for each in hierarchy]
    if any(_note_plans in each for each in processors):
        for each in processors:
            if _note_plans not in each:
                each.append(_note_plans)


def tokens_for(
    connection: Connection, fenced: FencedTable, options: Mapping[str, Any], writer: Writer
) -> Tokens:
    """Return the tokens for a statement: those that its flush has found already, if it is the unit of work's.

    Raises:
        LockLostError: if a lease has ended since.
    """
    found = None
    if "compiled_cache" in options:  # the unit of work has one of its own for each mapper
        flush = _executing(connection)
        found = None if flush is None else flush.tokens(fenced, connection)
        if found is not None and found.serves(writer):
            return found
    made = Tokens(connection, fenced, options, writer=writer)
    if found is not None:
        made.loaded, made.write_id = found.loaded, found.write_id
    return made


def loaded_id(current: Mapping[str, Any]) -> int | None:
    """Return the write id that an object was loaded with; None if unknown."""
    return current.get(WRITE_COLUMN)


def rows_known_to(
    connection: Connection, fenced: FencedTable
) -> Callable[[tuple[Any, ...]], tuple[Any, ...] | None]:
    """Return how to look up, by primary key, the template's values of a row that the session knows.

    They are those that were loaded, whatever has been assigned since; None for an unknown row.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    if session is None or mapper is None:
        return lambda _identity: None
    flush = under_way.get(session.hash_key) if is_flushing(session) else None
    known = flush.known.get(fenced, {}) if flush else {}
    names = tuple(fenced.template.columns)

    def values_of(identity: tuple[Any, ...]) -> tuple[Any, ...] | None:
        values = known.get(identity)
        if values is not None:
            return values
        instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
        if instance is not None:
            state: InstanceState[Any] = inspect(instance)
            return loaded_values(names, state, state.dict)
        for state in flush.unsaved if flush else ():
            if tuple(mapper.primary_key_from_instance(state.obj())) == identity:
                return loaded_values(names, state, state.dict)
        return None

    return values_of


def loaded_values(
    names: tuple[str, ...], state: InstanceState[Any], current: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return attributes as they were loaded, or None where one is not known."""
    assigned = state.committed_state if state.key is not None else {}
    values = []
    for name in names:
        value = assigned[name] if name in assigned else current.get(name)
        if value is None:
            value = getattr(state.obj(), name)  # expired, deferred, or not there yet
        if value is None or value is NO_VALUE:
            return None
        values.append(value)
    return tuple(values)


def in_unit_of_work(connection: Connection, fenced: FencedTable, options: Mapping[str, Any]) -> bool:
    """Tell whether a flush is executing a statement of its own on the rows of a fenced model.

    Bulk operations are no flush, and what listeners execute during one is not the flush's.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    return (
        session is not None
        and mapper is not None
        and executes_flush(session)
        and options.get("compiled_cache") is cache_of(mapper.base_mapper)
    )


def writes_fenced_rows(
    connection: Connection, fenced: FencedTable, table: Table, rows: Iterable[Mapping[str, Any]]
) -> bool:
    """Tell whether the flush writes the fenced rows as well that rows of a joined sub-table belong to.

    It does not where only a relationship with `post_update` on the other side wants the sub-table changed.
    """
    session = owner_of(connection)
    mapper = fenced.mapper() if fenced.mapper else None
    if session is None or mapper is None:
        return False
    flush = under_way.get(session.hash_key)
    names = _key_names(mapper, table)
    for row in rows:
        identity = tuple([row.get(name) for name in names])
        if _is_plain(session, mapper, fenced, identity):
            continue
        if flush is None or not flush.writes(session, mapper, identity):
            return False
    return True


def _is_plain(session: Session, mapper: Mapper[Any], fenced: FencedTable, identity: tuple[Any, ...]) -> bool:
    """Tell whether a row is that of an object whose class has no part in the fenced table."""
    instance = session.identity_map.get(mapper.identity_key_from_primary_key(identity))
    if instance is None:
        return False
    its: Mapper[Any] = inspect(instance).mapper
    return fenced.table not in its.tables


def _key_names(base: Mapper[Any], table: Table) -> list[str]:
    """Return the parameters with which the unit of work names a row of a sub-table, in the key's order."""
    mapper = next(each for each in base.self_and_descendants if table in each.tables)
    columns = key_in_table(mapper, table)
    labels: dict[str, Any] = {
        mapper.get_property_by_column(column).key: parameter_of(column) for column in columns
    }
    keys = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    return [labels[key] for key in keys] if labels.keys() == set(keys) else list(labels.values())
