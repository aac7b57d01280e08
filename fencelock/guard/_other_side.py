"""Changes of a fenced row's relationships that the unit of work does not see in the fenced object itself.

A link in a many-to-many table goes with the object at its other end when that one is deleted. The order of a
collection (`ordering_list`) stands in its children. Neither changes an attribute of the fenced object, so its
row would not be written, and the fence not be compared. Here it is raised by a statement of its own, once for
a row and flush, and only where the flush does not write the row anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import BigInteger, Update, bindparam, event, inspect, select, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.orderinglist import OrderingList
from sqlalchemy.orm import InstanceState, Mapper, RelationshipProperty
from sqlalchemy.orm.base import INCLUDE_PENDING_MUTATIONS, NO_VALUE, PASSIVE_NO_INITIALIZE, PASSIVE_OFF

from fencelock.guard._bypass import is_bypassed
from fencelock.guard._statement import ALL_KNOWN, LOADED_BIND, as_loaded, unchanged_by_raising
from fencelock.guard._tables import FENCE_COLUMN, FencedTable
from fencelock.guard.session import flush_of, loaded_fence, note_plans_of

_KEY: Final = "fencelock_key_"

_watched: WeakKeyDictionary[Mapper[Any], FencedTable] = WeakKeyDictionary()
"""The mappers of fenced models."""

_listening: WeakKeyDictionary[RelationshipProperty[Any], WeakSet[RelationshipProperty[Any]]]
_listening = WeakKeyDictionary()
"""By relationship, those at the other side that are listened to; it is itself among them for its places."""


def watch_relationships(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the other side of a fenced model's relationships, once these are configured."""
    _watched[mapper] = fenced


def on_configured() -> None:
    """Listen to the models at the other side: a listener for the end of SQLAlchemy's configuration."""
    for mapper, fenced in tuple(_watched.items()):
        for relationship in mapper.relationships:
            known = _listening.setdefault(relationship, WeakSet())
            if relationship.secondary is not None and not relationship.viewonly:
                _listen_to_links(relationship, fenced, known)
            elif relationship not in known:
                known.add(relationship)
                _listen_to_places(relationship, fenced)


def _listen_to_links(
    relationship: RelationshipProperty[Any], fenced: FencedTable, known: WeakSet[RelationshipProperty[Any]]
) -> None:
    """Listen to whoever else writes the links: a reverse relationship, or one that knows nothing of this."""
    reverses = relationship._reverse_property  # noqa: SLF001  no public way to ask
    hierarchy = relationship.mapper.base_mapper.self_and_descendants
    for other in {*reverses, *(other for mapper in hierarchy for other in mapper.relationships)}:
        is_of_table = other.secondary is relationship.secondary and not other.viewonly
        if not is_of_table or other is relationship or other in known:
            continue
        known.add(other)
        _listen(other.parent, "before_delete", partial(_on_unlinked, fenced, other))
        note_plans_of(other.parent)
        if other not in reverses or other.sync_backref is False:
            for name in ("before_insert", "before_update"):
                _listen(other.parent, name, partial(_on_linked, fenced, other))


def _listen_to_places(relationship: RelationshipProperty[Any], fenced: FencedTable) -> None:
    """Listen to the children of a collection that keeps its order in them."""
    attribute = None if relationship.viewonly else _ordering_attribute(relationship)
    if attribute is not None:
        child = relationship.mapper
        named = child.synonyms[attribute].name if attribute in child.synonyms else attribute
        listener = partial(_on_moved, fenced, relationship, named)
        _listen(child, "before_update", listener)


def _listen(mapper: Mapper[Any], name: str, listener: Any) -> None:
    event.listen(mapper, name, listener, raw=True, propagate=True)


def _ordering_attribute(relationship: RelationshipProperty[Any]) -> str | None:
    """Return the attribute of the children that an `ordering_list` keeps their place in."""
    factory = relationship.collection_class
    made = factory() if callable(factory) else None
    return made.ordering_attr if isinstance(made, OrderingList) else None


def _on_unlinked(
    fenced: FencedTable,
    relationship: RelationshipProperty[Any],
    _mapper: object,
    connection: Connection,
    state: InstanceState[Any],
) -> None:
    """Guard the fenced rows that an object is linked to when it is deleted, and its links with it."""
    # Those that are not loaded are deleted by the database.
    passive = PASSIVE_NO_INITIALIZE if relationship.passive_deletes else PASSIVE_OFF
    plan: Any = flush_of(state).plan()
    if plan is None:
        history = state.get_history(relationship.key, passive).as_state()
    else:  # it has been asked before the links were deleted; some relationships read them anew
        history = plan.get_attribute_history(state, relationship.key, passive)
    for linked in history.non_added():
        _raise_linked(fenced, connection, state, linked)


def _on_linked(
    fenced: FencedTable,
    relationship: RelationshipProperty[Any],
    _mapper: object,
    connection: Connection,
    state: InstanceState[Any],
) -> None:
    """Guard the fenced rows that an object is linked to, or not any more."""
    changes = state.get_history(relationship.key, PASSIVE_NO_INITIALIZE | INCLUDE_PENDING_MUTATIONS)
    for linked in (*changes.added, *changes.deleted):
        _raise_linked(fenced, connection, state, linked and inspect(linked))


def _raise_linked(
    fenced: FencedTable,
    connection: Connection,
    state: InstanceState[Any],
    linked: InstanceState[Any] | None,
) -> None:
    if linked is not None and linked.key is not None:
        _raise_fence(fenced, connection, state, linked.mapper, linked.key[1])


def _on_moved(
    fenced: FencedTable,
    relationship: RelationshipProperty[Any],
    attribute: str,
    _mapper: object,
    connection: Connection,
    state: InstanceState[Any],
) -> None:
    """Guard the fenced row whose collection a child is in when its place changes."""
    child, parent, changed = state.mapper, relationship.parent, state.committed_state
    if attribute not in changed and (attribute in child.columns or not changed):
        return  # of what is no column, as a hybrid attribute, any column may be a part
    pairs = {
        referred: child.get_property_by_column(own).key for referred, own in relationship.synchronize_pairs
    }
    before = {**state.dict, **changed}
    if any(before.get(key, NO_VALUE) is NO_VALUE for key in pairs.values()):  # deferred, or expired
        before |= _read(connection, state, pairs.values())
    for values in (state.dict, before):
        referred = {column: values.get(key) for column, key in pairs.items()}
        if None not in referred.values():
            for identity in _referred(connection, parent, referred):
                _raise_fence(fenced, connection, state, parent, identity)


def _referred(
    connection: Connection, parent: Mapper[Any], values: Mapping[Any, Any]
) -> Iterable[Iterable[Any]]:
    """Return the primary keys of rows that are referred to: by these very columns, or by unique ones."""
    named = {parent.get_property_by_column(column).key: value for column, value in values.items()}
    key = [parent.get_property_by_column(column).key for column in parent.primary_key]
    if named.keys() >= set(key):
        return [[named[each] for each in key]]
    of_row = (column == value for column, value in values.items())
    query = select(*parent.primary_key).select_from(parent.persist_selectable).where(*of_row)
    return connection.execute(query).all()


def _read(connection: Connection, state: InstanceState[Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Read attributes of an object from its row: no option of a query forbids that."""
    columns = {name: state.mapper.columns[name] for name in names}
    assert state.key is not None  # noqa: S101  it is about to be updated
    of_row = zip(state.mapper.primary_key, state.key[1], strict=True)
    query = select(*columns.values()).where(*(column == value for column, value in of_row))
    row = connection.execute(query).first()
    return dict(zip(columns, row or (), strict=False))


def _raise_fence(
    fenced: FencedTable,
    connection: Connection,
    state: InstanceState[Any],
    mapper: Mapper[Any],
    identity: Iterable[Any],
) -> None:
    """Raise the fence of a row to the token of its lease, unless this flush does so anyway.

    Args:
        fenced: its table.
        connection: on which the flush is executed.
        state: of the object that is flushed.
        mapper: of the row's object.
        identity: the row's primary key.
    """
    key = tuple(identity)
    session = state.session
    if session is None or is_bypassed(connection.get_execution_options()):
        return
    flush = flush_of(state)
    if (fenced, key) in flush.raised or flush.writes(session, mapper, key):
        return
    flush.raised.add((fenced, key))
    instance = session.identity_map.get(
        mapper.identity_key_from_primary_key(key, identity_token=state.identity_token)
    )
    known = None if instance is None else inspect(instance)
    loaded = None if known is None else loaded_fence(known, known.dict)
    values = {f"{_KEY}{at}": value for at, value in enumerate(key)}
    if loaded is not None:
        values[LOADED_BIND] = loaded
    result = connection.execute(_raising(fenced, known=loaded is not None), values)
    if known is not None and FENCE_COLUMN in known.dict:
        flush.stamped.setdefault(known, loaded)
        known.dict[FENCE_COLUMN] = result.context.compiled_parameters[0][fenced.fence.key]


def _raising(fenced: FencedTable, *, known: bool) -> Update:
    """Return the statement that does nothing but raise the fence of a row; the guard adds the token."""
    table = fenced.table
    named = (
        column == bindparam(f"{_KEY}{at}", type_=column.type) for at, column in enumerate(table.primary_key)
    )
    statement = update(table).where(*named).values(unchanged_by_raising(table))
    if known:
        loaded = bindparam(LOADED_BIND, type_=BigInteger)
        statement = statement.where(as_loaded(table.c[fenced.fence.key], loaded, ALL_KNOWN))
    return statement
