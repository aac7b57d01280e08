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

from sqlalchemy import BigInteger, Update, bindparam, event, inspect, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.orderinglist import OrderingList
from sqlalchemy.orm import InstanceState, Mapper, RelationshipProperty
from sqlalchemy.orm.base import PASSIVE_OFF

from fencelock.guard._bypass import is_bypassed
from fencelock.guard._statement import ALL_KNOWN, LOADED_BIND, as_loaded, unchanged_by_raising
from fencelock.guard._tables import FENCE_COLUMN, FencedTable
from fencelock.guard.session import flush_of, loaded_fence

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
                for reverse in relationship._reverse_property:  # noqa: SLF001  no public way to ask
                    _listen(reverse.parent, "before_delete", partial(_on_unlinked, fenced, reverse))
            elif attribute := _ordering_attribute(relationship):
                listener = partial(_on_moved, fenced, relationship, attribute)
                _listen(relationship.mapper, "before_update", listener)
            _listening[relationship] = None


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
    if relationship.passive_deletes:  # the database deletes them
        return
    for linked in state.get_history(relationship.key, PASSIVE_OFF).non_added():
        if linked is not None:
            other = inspect(linked)
            _raise_fence(
                fenced, connection, state, other.mapper, other.mapper.primary_key_from_instance(linked)
            )


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
    named: Iterable[Mapping[str, Any]] = (state.dict, {**state.dict, **state.committed_state})
    for values in named:
        identity = [values.get(keys.get(column, "")) for column in relationship.parent.primary_key]
        if None not in identity:
            _raise_fence(fenced, connection, state, relationship.parent, identity)


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
