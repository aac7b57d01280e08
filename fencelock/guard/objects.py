"""The unit of work: each object brings the write id that it was loaded with into its statement.

Before an object is written, its `last_write_id` becomes a `Stamp`, which `statements` finds among the
parameters. If the parameters have only the key, `statements` finds the object in the session. A change in a
joined sub-table writes the base row, too. So does a change in a collection or a link table if the row's lease
is held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import event, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.orm import InstanceState, Mapper, RelationshipDirection, Session
from sqlalchemy.orm.base import INCLUDE_PENDING_MUTATIONS, NO_VALUE, PASSIVE_NO_INITIALIZE
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard._sqlalchemy import always_load, cache_of, executes_flush, left_out_of
from fencelock.guard.events import report
from fencelock.guard.leases import TokenLookup, open_leases
from fencelock.guard.sessions import SHIFTED, is_bypassed, join, owner_of
from fencelock.guard.tables import (
    FENCE_COLUMN,
    NO_LEASE,
    NO_VERSION,
    WRITE_COLUMN,
    FencedTable,
    fenced_table,
    new_write_id,
    shifted,
)

if TYPE_CHECKING:
    from typing import TypeAlias

    _State: TypeAlias = InstanceState[Any]

_CHANGES_ONLY: Final = PASSIVE_NO_INITIALIZE | INCLUDE_PENDING_MUTATIONS
"""The flags with which an attribute returns its changes, and loads nothing."""

_FLUSH: Final = "fencelock.flush"
"""The key in `session.info` of a flush's tokens by table and connection; None if the guard is bypassed."""


class Stamp(int):
    """The id of a write, with the id that it replaces (None if that is unknown), and its token."""

    loaded: int | None
    token: int

    def __reduce__(self) -> Any:
        return int, (int(self),)


def new_stamp(write_id: int, token: int, loaded: int | None) -> Stamp:
    made = Stamp(write_id)
    made.token, made.loaded = token, loaded
    return made


def on_flush(session: Session, *_: object) -> None:
    session.info[_FLUSH] = {}


def on_undone(_session: Session, instance: object) -> None:
    """Remove the fence and the write id from an object that is transient again, as after a rollback."""
    state: _State = inspect(instance)
    if any(map(fenced_table, state.mapper.tables)):
        for name in (FENCE_COLUMN, WRITE_COLUMN):
            state.dict.pop(name, None)


def flush_of(connection: Connection, fenced: FencedTable, options: Mapping[str, Any]) -> TokenLookup | None:
    """Return the tokens of the flush that executes this statement; None without a flush, or if bypassed.

    Bulk operations are no flush. Statements that the program's listeners execute belong to no flush.
    """
    cache, session = options.get("compiled_cache"), owner_of(connection)
    if cache is None or session is None or not executes_flush(session):
        return None
    if not any(cache is cache_of(mapper) for mapper in fenced.mappers()):
        return None
    return _tokens(session, connection, fenced)


def _tokens(session: Session, connection: Connection, fenced: FencedTable) -> TokenLookup | None:
    """Return a flush's tokens for rows of a table, or None where the connection bypasses the guard."""
    found: dict[Any, TokenLookup | None] = session.info.setdefault(_FLUSH, {})
    key = fenced, connection
    if key not in found:
        join(connection, session)  # another session may have used the connection since
        bypassed = is_bypassed(connection.get_execution_options(), connection)
        found[key] = None if bypassed else TokenLookup(connection, fenced)
    return found[key]


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
    for new in session.new if executes_flush(session) else ():  # inserted by this flush
        state: _State = inspect(new)
        if fenced.table in state.mapper.tables and tuple(state.mapper.primary_key_from_instance(new)) == key:
            return state
    return None


def watch_mapper(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the unit of work of a fenced model, and to its loads.

    The listener for UPDATEs is called last, just before an object's columns are read, so it sees the changes
    of other listeners and of cascades. With `retval`, SQLAlchemy calls our functions without a wrapper.
    """
    watch = _Watch(mapper, fenced)
    for name in ("before_insert", "after_insert", "before_update", "before_delete"):
        event.listen(mapper, name, getattr(watch, name), raw=True, retval=True)
    event.listen(mapper, "mapper_configured", watch.on_configured)
    event.listen(mapper.class_manager, "refresh", _on_refresh, raw=True)


def _aging_of(mapper: Mapper[Any]) -> set[str]:
    """Return the columns that another write may have changed since they were loaded."""
    keys = {mapper.get_property_by_column(column).key for column in mapper.primary_key}
    return set(mapper.columns.keys()) - keys - {FENCE_COLUMN, WRITE_COLUMN}


class _Watch:
    """Gives the objects of one mapper their tokens and write ids before they are written."""

    __slots__ = ("_aging", "_fenced", "_resource_names")

    def __init__(self, mapper: Mapper[Any], fenced: FencedTable) -> None:
        columns: list[tuple[str, Any]] = list(mapper.columns.items())
        own = {column: key for key, column in columns if getattr(column, "table", None) is fenced.table}
        self._fenced = fenced
        self._aging = _aging_of(mapper)
        self._resource_names = tuple(own[column] for column in fenced.template.columns.values())

    def on_configured(self, mapper: Mapper[Any], model: Any) -> None:
        """Move our listener for UPDATEs behind all others, which may change more columns; watch write ids."""
        event.remove(mapper, "before_update", self.before_update)
        event.listen(mapper, "before_update", self.before_update, raw=True, retval=True)
        always_load(mapper, mapper.columns[WRITE_COLUMN])
        event.listen(getattr(model, WRITE_COLUMN), "set", _on_set, retval=True)

    def before_insert(self, _mapper: object, connection: Connection, state: _State) -> None:
        tokens = self._tokens(connection, state)
        if tokens is None:
            # Replace a fence that a form may have assigned. A program sets a fence with a statement instead.
            state.dict[FENCE_COLUMN], state.dict[WRITE_COLUMN] = 0, new_write_id()
            return
        token = self._token_for(tokens, state)
        state.dict[WRITE_COLUMN] = new_stamp(tokens.write_id, token, None)
        state.dict[FENCE_COLUMN] = token

    def after_insert(self, _mapper: object, connection: Connection, state: _State) -> None:
        if state.dict.get(FENCE_COLUMN) == 0 and (tokens := self._tokens(connection, state)) is not None:
            values = loaded_values(self._resource_names, state)
            if values is not None:
                tokens.leases.unlockable.add(self._fenced.template.render(values))

    def before_update(self, _mapper: object, connection: Connection, state: _State) -> None:
        current = state.dict
        if FENCE_COLUMN in state.committed_state:
            _drop_assigned_fence(state, current)
        changed = _changed(state, current)
        tokens = self._tokens(connection, state) if changed else None
        if not changed:
            return
        if changed == "a collection" and not (
            tokens and tokens.holds(loaded_values(self._resource_names, state))
        ):
            return
        if tokens is None:
            current[WRITE_COLUMN] = new_write_id()
        else:
            current[WRITE_COLUMN] = stamp = self._stamp(tokens, state, current)
            if stamp.token != NO_LEASE:
                current[FENCE_COLUMN] = stamp.token
        state.committed_state[WRITE_COLUMN] = NO_VALUE  # marks the id as changed, so that the row is written

    def before_delete(self, _mapper: object, connection: Connection, state: _State) -> None:
        tokens = self._tokens(connection, state)
        if tokens is not None:
            state.dict[WRITE_COLUMN] = self._stamp(tokens, state, state.dict)

    def _tokens(self, connection: Connection, state: _State) -> TokenLookup | None:
        session = state.session
        assert session is not None  # noqa: S101  an object that is being flushed has a session
        tokens = _tokens(session, connection, self._fenced)
        if tokens is not None:
            tokens.leases.shard = state.identity_token
        return tokens

    def _stamp(self, tokens: TokenLookup, state: _State, current: Mapping[str, Any]) -> Stamp:
        """Return the stamp for an object that has a row.

        An expired object that was only assigned to has no old values, so it needs no write id. An object
        that was loaded without its write id is refused.
        """
        token = self._token_for(tokens, state)  # this may load an expired object
        loaded = current.get(WRITE_COLUMN)
        if loaded is None and any(_was_loaded(state, key) for key in self._aging):
            error = UnfencedWriteError(
                f"this {state.mapper.class_.__name__} was loaded without {WRITE_COLUMN}, so the guard "
                "cannot tell its version: load that column with the others, or load the object again"
            )
            report(error, table=self._fenced.name)
            raise error
        return new_stamp(tokens.write_id, token, None if loaded is None else int(loaded))

    def _token_for(self, tokens: TokenLookup, state: _State) -> int:
        try:
            values = loaded_values(self._resource_names, state)
            return self._unnamed(tokens, state) if values is None else tokens.of_row(values)
        except FenceError as error:
            report(error, table=self._fenced.name)
            raise

    def _unnamed(self, tokens: TokenLookup, state: _State) -> int:
        """Return the token of a row whose resource gets its name from a default or from the database."""
        template, is_new, values = self._fenced.template, state.key is None, []
        for name, column in zip(self._resource_names, template.columns.values(), strict=True):
            value = state.dict.get(name)
            if value is None and is_new and isinstance(column.default, ScalarElementColumnDefault):
                value = column.default.arg
            makes = column.primary_key or column.default is not None or column.server_default is not None
            if value is None and column.nullable and not (is_new and makes):
                raise UnfencedWriteError(
                    f"{name} of this row of {self._fenced.name!r} is NULL, so that {template.text!r} names "
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


def _drop_assigned_fence(state: _State, current: dict[str, Any]) -> None:
    """Restore the fence of the row, because a form, a dump or a merge may have assigned another fence."""
    loaded = state.committed_state.pop(FENCE_COLUMN)
    if loaded is NO_VALUE:
        del current[FENCE_COLUMN]
    else:
        current[FENCE_COLUMN] = loaded


def _was_loaded(state: _State, key: str) -> bool:
    """Tell whether an attribute was loaded from the database, even if it was changed since."""
    return key in state.dict and state.committed_state.get(key) is not NO_VALUE


def _changed(state: _State, current: dict[str, Any]) -> Literal["its row", "a collection"] | None:
    """Return which part of an object has changed: its row, or only a collection; None if neither."""
    manager, found = state.manager, False
    for key, loaded in tuple(state.committed_state.items()):
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
    if type(before) is Stamp and found == before.loaded:
        return before  # the object is being flushed, but its row was not written yet
    was_assigned = type(before) is int and state.committed_state.get(WRITE_COLUMN) is NO_VALUE
    context.attributes[WRITE_COLUMN, state] = found, was_assigned and before != found
    return found


def _on_refresh(state: InstanceState[Any], context: Any, names: Collection[str] | None) -> None:
    """Set the write id of a loaded object: `NO_VERSION` if it mixes versions; shifted after an UPDATE."""
    current = state.dict
    if context is None:  # an UPDATE by criteria is applied to the objects that it has matched
        by = None if state.session is None else state.session.info.get(SHIFTED)
        if by and isinstance(current.get(WRITE_COLUMN), int):
            current[WRITE_COLUMN] = shifted(current[WRITE_COLUMN], by)
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
