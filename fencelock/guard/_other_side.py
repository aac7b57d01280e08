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
from weakref import WeakKeyDictionary

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

_listening: WeakKeyDictionary[RelationshipProperty[Any], None] = WeakKeyDictionary()
"""The relationships whose other side is listened to."""


def watch_relationships(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the other side of a fenced model's relationships, once these are configured."""
    _watched[mapper] = fenced


def on_configured() -> None:
    """Listen to the models at the other side: a listener for the end of SQLAlchemy's configuration."""
    for mapper, fenced in tuple(_watched.items()):
        for relationship in mapper.relationships:
            if relationship.viewonly or relationship in _listening:
                continue
            if relationship.secondary is not None:
                _listen_to_links(relationship, fenced)
            elif attribute := _ordering_attribute(relationship):
                listener = partial(_on_moved, fenced, relationship, attribute)
                _listen(relationship.mapper, "before_update", listener)
            _listening[relationship] = None


def _listen_to_links(relationship: RelationshipProperty[Any], fenced: FencedTable) -> None:
    """Listen to whoever else writes the links: a reverse relationship, or one that knows nothing of this."""
    reverses = relationship._reverse_property  # noqa: SLF001  no public way to ask
    for other in {*reverses, *relationship.mapper.relationships}:
        if other.secondary is not relationship.secondary or other.viewonly or other is relationship:
            continue
        _listen(other.parent, "before_delete", partial(_on_unlinked, fenced, other))
        note_plans_of(other.parent)
        if other not in reverses:
            for name in ("before_insert", "before_update"):
                _listen(other.parent, name, partial(_on_linked, fenced, other))


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
    if attribute not in state.committed_state:
        return
    child = state.mapper
    keys = {
        parent: child.get_property_by_column(column).key for parent, column in relationship.synchronize_pairs
    }
    before = {**state.dict, **state.committed_state}
    if any(before.get(key, NO_VALUE) is NO_VALUE for key in keys.values()):  # deferred, or expired
        before |= _read(connection, state, keys.values())
    for values in (state.dict, before):
        identity = [values.get(keys.get(column, "")) for column in relationship.parent.primary_key]
        if None not in identity:
            _raise_fence(fenced, connection, state, relationship.parent, identity)


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
