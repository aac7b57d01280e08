"""The unit of work: a flush writes a row only if the row has the write id with which its object was loaded.

Before an object is written, its expired columns are loaded, and its token and id are noted in the flush. The
object gets the new id when the database has it. A change in a joined sub-table writes the base row, too. So
does a change in a collection or a link table if the row's lease is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal
from weakref import WeakKeyDictionary

from sqlalchemy import event, inspect, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import InstanceState, Mapper, RelationshipDirection, Session
from sqlalchemy.orm.base import INCLUDE_PENDING_MUTATIONS, NO_VALUE, PASSIVE_NO_INITIALIZE
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard._sqlalchemy import always_load, cache_of, executes_flush, left_out_of
from fencelock.guard.events import report
from fencelock.guard.leases import TokenLookup, open_leases
from fencelock.guard.sessions import NOTES, is_bypassed, join, notes_loads, notes_of, owner_of
from fencelock.guard.tables import (
    FENCE_COLUMN,
    NO_LEASE,
    NO_VERSION,
    WRITE_COLUMN,
    FencedTable,
    excluded_of,
    fenced_table,
    is_one_of,
    new_write_id,
    shifted,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    _State: TypeAlias = InstanceState[Any]

_CHANGES_ONLY: Final = PASSIVE_NO_INITIALIZE | INCLUDE_PENDING_MUTATIONS
"""The flags with which an attribute returns its changes, and loads nothing."""


@dataclass(eq=False, slots=True)
class Written:
    """A row that a flush writes."""

    state: _State
    key: tuple[Any, ...]
    token: int
    loaded: int  # the write id with which the object was loaded
    now: int  # the write id of the row, as the flush goes on
    is_updated: bool = False  # by an UPDATE of this object's own changes


class FlushTokens(TokenLookup):
    """The tokens of one flush for the rows of a table, and what it writes there."""

    __slots__ = ("gone", "inserted", "rows", "sending", "sent_id")

    rows: dict[tuple[Any, ...], Written]  # by primary key
    sending: list[Written]  # the rows of the last UPDATE
    sent_id: int  # their new write id
    inserted: set[int]  # the tokens of new rows
    gone: set[tuple[Any, ...]]  # rows that the session itself has deleted before

    def find(self, connection: Connection, key: tuple[Any, ...]) -> Written:
        """Return a row that no listener has noted: of a `post_update`, or of a new object in its place."""
        state = object_of(connection, self.fenced, key)
        if state is None:
            raise UnfencedWriteError(
                f"a flush writes to the row {key!r} of {self.fenced.name!r}, and has no object of it"
            )
        return _watches[state.mapper].note(self, state, key)

    def note_sent(self) -> None:
        """Give the objects of the last UPDATE the write id, and the fence, that the database has now."""
        if not self.sending:
            return
        write_id = self.sent_id
        session = self.sending[0].state.session
        deleted = session.deleted if session is not None else ()
        for written in self.sending:
            written.now = write_id
            state: _State | None = written.state
            if session is not None and not written.is_updated and written.state.obj() in deleted:
                state = _pending(session, self.fenced, written.key)  # a new object of its row, or None
            if state is not None:
                state.dict[WRITE_COLUMN] = write_id
                if written.token != NO_LEASE:
                    state.dict[FENCE_COLUMN] = written.token


def on_flush(session: Session, *_: object) -> None:
    if (notes := getattr(session, NOTES, None)) is not None:
        notes.flush.clear()


def on_undone(_session: Session, instance: object) -> None:
    """Remove the fence and the write id from an object that is transient again, as after a rollback."""
    state: _State = inspect(instance)
    if any(map(fenced_table, state.mapper.tables)):
        for name in (FENCE_COLUMN, WRITE_COLUMN):
            state.dict.pop(name, None)


def flush_of(connection: Connection, fenced: FencedTable, options: Mapping[str, Any]) -> FlushTokens | None:
    """Return the tokens of the flush that executes this statement; None without a flush, or if bypassed.

    Bulk operations are no flush. Statements that the program's listeners execute belong to no flush.
    """
    cache, session = options.get("compiled_cache"), owner_of(connection)
    if cache is None or session is None or not executes_flush(session):
        return None
    if id(cache) not in map(id, map(cache_of, fenced.mappers())):
        return None
    return _tokens(session, connection, fenced)


def _tokens(session: Session, connection: Connection, fenced: FencedTable) -> FlushTokens | None:
    """Return a flush's tokens for rows of a table, or None where the connection bypasses the guard."""
    known: dict[Any, FlushTokens | None] = (getattr(session, NOTES, None) or notes_of(session)).flush
    key = fenced, connection
    if key not in known:
        join(connection, session)  # another session may have used the connection since
        known[key] = None
        if not is_bypassed(connection.get_execution_options(), connection):
            found = known[key] = FlushTokens(connection, fenced)
            found.rows, found.sending, found.gone, found.inserted = {}, [], set(), set()
    return known[key]


def object_of(connection: Connection, fenced: FencedTable, key: tuple[Any, ...]) -> _State | None:
    session = owner_of(connection)
    if session is None:
        return None
    leases = open_leases(connection)
    shard = None if leases is None else leases.shard
    for mapper in fenced.mappers():
        known = session.identity_map.get(mapper.identity_key_from_primary_key(key, identity_token=shard))
        if known is not None:
            found: _State = inspect(known)
            return found
    if not executes_flush(session):
        return None
    # For the DELETE of an object of a shard, a `post_update` comes before the event that tells the shard.
    own = [each for each in session.deleted if inspect(each).identity == key and _is_of(each, fenced)]
    return inspect(own[0]) if own else _pending(session, fenced, key)


def _pending(session: Session, fenced: FencedTable, key: tuple[Any, ...]) -> _State | None:
    """Return the object that this flush inserts with a key."""
    for new in session.new:
        state: _State = inspect(new)
        if _is_of(new, fenced) and tuple(state.mapper.primary_key_from_instance(new)) == key:
            return state
    return None


def _is_of(instance: object, fenced: FencedTable) -> bool:
    return fenced.table in inspect(instance).mapper.tables


_watches: Final[WeakKeyDictionary[Mapper[Any], _Watch]] = WeakKeyDictionary()


def watch_mapper(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the unit of work of a fenced model, and to its loads.

    The listener for UPDATEs is called last, just before an object's columns are read, so it sees the changes
    of other listeners and of cascades. With `retval`, SQLAlchemy calls our functions without a wrapper.
    """
    watch = _watches[mapper] = _Watch(mapper, fenced)
    for name in ("before_insert", "after_insert", "before_update", "before_delete"):
        event.listen(mapper, name, getattr(watch, name), raw=True, retval=True)
    event.listen(mapper, "mapper_configured", watch.on_configured)
    event.listen(mapper.class_manager, "refresh", _on_refresh, raw=True)


def _aging_of(mapper: Mapper[Any]) -> set[str]:
    """Return the columns that another write may have changed since they were loaded."""
    keys = {mapper.get_property_by_column(column).key for column in mapper.primary_key}
    return set(mapper.columns.keys()) - keys - {FENCE_COLUMN, WRITE_COLUMN}


def attributes_of(mapper: Mapper[Any], columns: Iterable[Any]) -> dict[str, Any]:
    """Return the columns that a mapper has, by attribute. `column_attrs` would configure the mappers."""
    found = {}
    for column in columns:
        with suppress(UnmappedColumnError):
            found[mapper.get_property_by_column(column).key] = column
    return found


class _Watch:
    """Gives the objects of one mapper their tokens and write ids before they are written."""

    __slots__ = ("_aging", "_excluded", "_first", "_resource_names", "fenced")

    def __init__(self, mapper: Mapper[Any], fenced: FencedTable) -> None:
        names = attributes_of(mapper, [column for table in mapper.tables for column in table.primary_key])
        self.fenced = fenced
        self._aging = _aging_of(mapper)
        self._excluded: Collection[str] = ()
        self._first = frozenset({*names, WRITE_COLUMN})  # what an UPDATE or DELETE needs
        self._resource_names = tuple(
            mapper.get_property_by_column(column).key for column in fenced.template.columns.values()
        )

    def on_configured(self, mapper: Mapper[Any], model: Any) -> None:
        """Move our listener for UPDATEs behind all others, which may change more columns; watch write ids."""
        event.remove(mapper, "before_update", self.before_update)
        event.listen(mapper, "before_update", self.before_update, raw=True, retval=True)
        always_load(mapper, mapper.columns[WRITE_COLUMN])
        excluded = {table.c[key] for table in mapper.tables for key in excluded_of(table)}
        to_one = [each for each in mapper.relationships if each.direction is RelationshipDirection.MANYTOONE]
        self._excluded = {
            *attributes_of(mapper, excluded),
            *(each.key for each in to_one if each.local_columns <= excluded),
        }
        event.listen(getattr(model, WRITE_COLUMN), "set", _on_set, retval=True)

    def before_insert(self, _mapper: object, connection: Connection, state: _State) -> None:
        tokens = self._tokens(connection, state)
        if tokens is None:
            # Replace a fence that a form may have assigned. A program sets a fence with a statement instead.
            state.dict[FENCE_COLUMN], state.dict[WRITE_COLUMN] = 0, new_write_id()
            return
        state.dict[FENCE_COLUMN] = token = self._token_for(tokens, state)
        state.dict[WRITE_COLUMN] = tokens.write_id
        tokens.inserted.add(token)
        if self._excluded:  # if it replaces a deleted object, its UPDATE needs the guard
            state.committed_state[WRITE_COLUMN] = NO_VALUE

    def after_insert(self, _mapper: object, connection: Connection, state: _State) -> None:
        if state.dict.get(FENCE_COLUMN) == 0 and (tokens := self._tokens(connection, state)) is not None:
            values = loaded_values(self._resource_names, state)
            if values is not None:
                tokens.leases.unlockable.add(self.fenced.template.render(values))

    def before_update(self, _mapper: object, connection: Connection, state: _State) -> None:
        current = state.dict
        if FENCE_COLUMN in state.committed_state:  # a form or a merge may have assigned another one
            loaded = state.committed_state.pop(FENCE_COLUMN)
            if loaded is NO_VALUE:
                del current[FENCE_COLUMN]
            else:
                current[FENCE_COLUMN] = loaded
        changed = _changed(state, current, self._excluded)
        tokens = self._tokens(connection, state) if changed else None
        if not changed:
            return
        if changed == "a collection" and not (
            tokens and tokens.holds(loaded_values(self._resource_names, state))
        ):
            return
        if tokens is None:
            self._load(state)
            current[WRITE_COLUMN] = new_write_id()
        else:
            self.note(tokens, state, state.key[1]).is_updated = True  # type: ignore[index]
        state.committed_state[WRITE_COLUMN] = NO_VALUE  # marks the id as changed, so that the row is written

    def before_delete(self, _mapper: object, connection: Connection, state: _State) -> None:
        tokens = self._tokens(connection, state)
        if tokens is not None:
            key: tuple[Any, ...] = state.key[1]  # type: ignore[index]
            self.note(tokens, state, key)
            if state.was_deleted:
                tokens.gone.add(key)

    def _tokens(self, connection: Connection, state: _State) -> FlushTokens | None:
        session = state.session
        assert session is not None  # noqa: S101  an object that is being flushed has a session
        tokens = _tokens(session, connection, self.fenced)
        if tokens is not None:
            tokens.leases.shard = state.identity_token
        return tokens

    def note(self, tokens: FlushTokens, state: _State, key: tuple[Any, ...]) -> Written:
        """Note the token of an object's row and the id that the object was loaded with.

        Expired columns are loaded now, and not between this and the statement, as by SQLAlchemy's version
        counter. An object that was loaded without its write id is refused.
        """
        known = tokens.rows.get(key)
        if known is not None and known.state is state:
            return known
        token = self._token_for(tokens, state)  # this may load an expired object
        if WRITE_COLUMN not in state.dict and any(_was_loaded(state, each) for each in self._aging):
            error = UnfencedWriteError(
                f"this {state.mapper.class_.__name__} was loaded without {WRITE_COLUMN}, so the guard "
                "cannot tell its version: load that column with the others, or load the object again"
            )
            report(error, table=self.fenced.name)
            raise error
        if not self._first <= state.dict.keys():
            self._load(state)
        loaded = state.dict[WRITE_COLUMN]
        loaded = now = NO_VERSION if loaded is None else int(loaded)
        if known is not None:  # of an object of another class, or with another identity token
            is_written_over = known.now != known.loaded == loaded
            now = known.now if is_written_over else NO_VERSION
        written = tokens.rows[key] = Written(state, key, token, loaded, now)
        return written

    def _load(self, state: _State) -> None:
        for name in self._first:
            if name not in state.dict:
                getattr(state.obj(), name)

    def _token_for(self, tokens: TokenLookup, state: _State) -> int:
        try:
            values = loaded_values(self._resource_names, state)
            return self._unnamed(tokens, state) if values is None else tokens.of_row(values)
        except FenceError as error:
            report(error, table=self.fenced.name)
            raise

    def _unnamed(self, tokens: TokenLookup, state: _State) -> int:
        """Return the token of a row whose resource gets its name from a default or from the database."""
        template, is_new, values = self.fenced.template, state.key is None, []
        for name, column in zip(self._resource_names, template.columns.values(), strict=True):
            value = state.dict.get(name)
            if value is None and is_new and isinstance(column.default, ScalarElementColumnDefault):
                value = column.default.arg
            makes = column.primary_key or column.default is not None or column.server_default is not None
            if value is None and column.nullable and not (is_new and makes):
                raise UnfencedWriteError(
                    f"{name} of this row of {self.fenced.name!r} is NULL, so that {template.text!r} names "
                    f"no resource and no lease can guard the row: name the resource by columns that are "
                    f"never NULL, such as the primary key, or give {name} a value that stands for none"
                )
            values.append(value)
        return tokens.of_row(tuple(values)) if is_new and None not in values else tokens.of_new_row()


def loaded_values(names: tuple[str, ...], state: _State) -> tuple[Any, ...] | None:
    """Return the values of attributes as they were loaded; None if one of them is unknown or NULL."""
    assigned = state.committed_state if state.key is not None else {}
    current = state.dict
    values = []
    for name in names:
        value = assigned[name] if name in assigned else current.get(name)
        if value is None:
            value = getattr(state.obj(), name)  # loads an expired or deferred attribute
        if value is None or value is NO_VALUE:
            return None
        values.append(value)
    return tuple(values)


def _was_loaded(state: _State, key: str) -> bool:
    """Tell whether an attribute was loaded from the database, even if it was changed since."""
    return key in state.dict and state.committed_state.get(key) is not NO_VALUE


def _changed(
    state: _State, current: dict[str, Any], excluded: Collection[str]
) -> Literal["its row", "a collection"] | None:
    """Return which part of an object has changed: its row, or only a collection; None if neither."""
    manager, found = state.manager, False
    for key, loaded in tuple(state.committed_state.items()):
        if key in excluded:
            continue
        impl: Any = manager[key].impl
        if impl.collection or impl.uses_objects:
            history, made = impl.get_history(state, current, _CHANGES_ONLY), manager[key].property
            if (history.added or history.deleted) and not made.viewonly:
                if made.direction is RelationshipDirection.MANYTOONE:
                    return "its row"
                found = True
        elif key not in current or impl.is_equal(current[key], loaded) is not True:
            return "its row"
    return "a collection" if found else None


def _on_set(_target: object, value: Any, old: Any, _initiator: object) -> Any:
    """Return the assigned write id; `NO_VERSION` if it is no int, or if the object has another one."""
    if not isinstance(value, int):
        return NO_VERSION
    return value if value == old or not isinstance(old, int) else NO_VERSION


def on_merged(given: _State, values: Mapping[str, Any], into: _State, current: dict[str, Any]) -> None:
    """Give an object the id `NO_VERSION` if an object merged into it was loaded without a write id."""
    is_unknown = WRITE_COLUMN not in values and any(map(fenced_table, into.mapper.tables))
    if is_unknown and any(_was_loaded(given, key) for key in _aging_of(into.mapper)):
        current[WRITE_COLUMN] = NO_VERSION


def on_row(context: Any, state: _State, before: int | None, found: int | None) -> int | None:
    """Note the id of a loaded row, and whether it contradicts an assigned one; return the id to keep."""
    was_assigned = before is not None and state.committed_state.get(WRITE_COLUMN) is NO_VALUE
    context.attributes[WRITE_COLUMN, state] = found, was_assigned and before != found
    return found


def loading_in(session: Session | None) -> Callable[[_State], None] | None:
    """Return a function to call with each object that a session loads now, or None."""
    return notes_of(session).loaded.add if session is not None and notes_loads(session) else None


def _follow(state: _State, current: dict[str, Any]) -> None:
    """Shift the write id of an object to which SQLAlchemy has just applied an UPDATE."""
    session: Session | None = state.session
    shift = None if session is None else notes_of(session).shift
    before = current.get(WRITE_COLUMN)
    if session is None or shift is None or not isinstance(before, int):
        return
    after = shifted(before, shift.by)
    keys = {state.mapper.get_property_by_column(column).key for column in state.mapper.primary_key}
    is_exact = not state.expired_attributes or (shift.names_keys and keys <= current.keys())
    if not is_exact and (connection := shift.connection()) is not None:
        # SQLAlchemy applies an UPDATE to each object for which it cannot evaluate the criteria.
        fenced, identity = _watches[state.mapper].fenced, inspect(state.obj()).identity
        found = connection.scalar(
            select(fenced.write).where(is_one_of(tuple(fenced.table.primary_key), [identity]))
        )
        after = found if found in {before, after} else NO_VERSION
    current[WRITE_COLUMN] = after
    if session.in_nested_transaction():
        notes_of(session).loaded.add(state)


def _on_refresh(state: _State, context: Any, names: Collection[str] | None) -> None:
    """Set the write id of a loaded object: `NO_VERSION` if it mixes versions; shifted after an UPDATE."""
    current = state.dict
    if context is None:
        _follow(state, current)
        return
    for made in state.mapper.composites:
        if names is None or not {column.key for column in made.props}.isdisjoint(names):
            current.pop(made.key, None)  # SQLAlchemy makes the composite again from its columns
    attributes: dict[Any, Any] = getattr(context, "attributes", {})
    if (WRITE_COLUMN, state) not in attributes:
        return  # the new part is of the same version
    (found, is_another), aging = attributes.pop((WRITE_COLUMN, state)), _aging_of(state.mapper)
    asked = {*aging, WRITE_COLUMN} if names is None else {*names}
    old = left_out_of(context, state.mapper) if names is None else aging - asked
    if not any(key in current for key in asked & {*aging, WRITE_COLUMN}):
        return  # the row was compared, but nothing was loaded
    is_another = is_another and names is not None  # an id was assigned, and only a part is loaded now
    is_mixed = is_another or any(_was_loaded(state, key) for key in old & aging)
    current[WRITE_COLUMN] = NO_VERSION if is_mixed else found
