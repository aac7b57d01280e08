"""What the unit of work stamps on the objects of fenced models, before their statements are made.

Objects show the fence that they were written with. A change in a collection, a link table or a joined
sub-table writes the base row, too. `rewrite` decides last which token goes into a statement.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from sqlalchemy import event, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.orm.base import INCLUDE_PENDING_MUTATIONS, NO_VALUE, PASSIVE_NO_INITIALIZE
from sqlalchemy.types import TypeEngine

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.guard._loading import was_loaded
from fencelock.guard._tables import FENCE_COLUMN, WRITE_COLUMN, FencedTable
from fencelock.guard.events import report
from fencelock.guard.flushes import (
    Flush,
    flush_of,
    loaded_id,
    loaded_values,
    note_mapper,
    note_plans_of,
)
from fencelock.guard.leases import fenced_table_of
from fencelock.guard.row_tokens import Tokens

if TYPE_CHECKING:
    from sqlalchemy.orm import InstanceState

_CHANGES_ONLY = PASSIVE_NO_INITIALIZE | INCLUDE_PENDING_MUTATIONS
"""Ask an attribute for its changes without loading anything."""


def watch_mapper(mapper: Mapper[Any], fenced: FencedTable) -> None:
    """Listen to the unit of work of a fenced model.

    The mapper's events are used, not the session's `before_flush`: they see also what other listeners and
    cascades have added to the flush, for each object, just before its columns are looked at.
    """
    note_mapper(mapper, fenced)
    watch = _Watch(mapper, fenced)
    # With retval SQLAlchemy calls them as they are; what they return is of no interest to it here.
    event.listen(mapper, "before_insert", watch.on_insert, raw=True, retval=True)
    watch.listen_to(mapper)
    event.listen(mapper, "before_delete", watch.on_delete, raw=True, retval=True)
    event.listen(mapper, "mapper_configured", watch.on_configured)
    note_plans_of(mapper)


class _Watch:
    """Stamps the objects of one mapper, and notes which resource guards each of them."""

    __slots__ = (
        "_aging",
        "_comparing",
        "_fenced",
        "_in_row",
        "_key",
        "_key_in",
        "_looked_up",
        "_naming",
    )

    def __init__(self, mapper: Mapper[Any], fenced: FencedTable) -> None:
        columns: Iterable[tuple[str, Any]] = mapper.columns.items()
        own = {column: key for key, column in columns if getattr(column, "table", None) is fenced.table}
        template = fenced.template
        self._fenced = fenced
        self._key = tuple(mapper.get_property_by_column(column).key for column in mapper.primary_key)
        self._key_in = operator.itemgetter(*self._key)
        self._in_row = frozenset(own.values()) - {FENCE_COLUMN, WRITE_COLUMN}
        self._aging = set(mapper.columns.keys()) - {*self._key, FENCE_COLUMN, WRITE_COLUMN}
        self._comparing: dict[str, Callable[[Any, Any], Any]] = {}
        self._naming = tuple(own[column] for column in template.columns.values())
        self._looked_up = not template.in_key

    def listen_to(self, mapper: Mapper[Any]) -> None:
        """Have UPDATEs be looked at."""
        event.listen(mapper, "before_update", self.on_update, raw=True, retval=True)

    def on_configured(self, mapper: Mapper[Any], _model: object) -> None:
        """Have UPDATEs be looked at after all listeners that are there by now: they may change more.

        No flush knows the mapper yet, so nobody is going through its listeners.
        """
        event.remove(mapper, "before_update", self.on_update)
        self.listen_to(mapper)

    def on_insert(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        flush = flush_of(state)
        if self._looked_up:
            flush.unsaved.append(state)
        flush.stamped.add(state)
        state.dict[WRITE_COLUMN] = flush.write_id
        tokens = flush.tokens(self._fenced, connection)
        if tokens is not None:
            state.dict[FENCE_COLUMN] = self._token_for(flush, tokens, state, state.dict)

    def on_update(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        current = state.dict
        writes_row = self._writes_row(state, current)
        flush = flush_of(state)
        if not writes_row and not _has_changed(state, current):
            state.committed_state.pop(FENCE_COLUMN, None)  # of an object that was merged, and claimed since
            flush.tokens(self._fenced, connection)  # for what another object's listener may change yet
            return
        is_part = WRITE_COLUMN not in current and self._is_part(state)
        if WRITE_COLUMN not in current:
            self._load_with_key(state, current)
        loaded = loaded_id(current)
        flush.stamped.add(state)
        tokens = flush.tokens(self._fenced, connection)
        if tokens is not None:
            token = self._token_for(flush, tokens, state, current)
            if is_part:
                self._refuse_part(state)
            self._note_loaded(tokens, state, current, loaded)
            current[FENCE_COLUMN] = token
        current[WRITE_COLUMN] = flush.write_id
        state.committed_state[WRITE_COLUMN] = NO_VALUE  # it looks changed, so the row is written

    def on_delete(self, _mapper: object, connection: Connection, state: InstanceState[Any]) -> None:
        flush = flush_of(state)
        is_part = WRITE_COLUMN not in state.dict and self._is_part(state)
        self._load_with_key(state, state.dict)
        tokens = flush.tokens(self._fenced, connection)
        if tokens is None:
            return
        if self._looked_up:
            self._token_for(flush, tokens, state, state.dict)
        elif tokens.none_held:  # the statement has the key, which the object need not be loaded for
            tokens.need_some(self._resource_of(state))
        if is_part:
            self._refuse_part(state)
        self._note_loaded(tokens, state, state.dict, loaded_id(state.dict))

    def _is_part(self, state: InstanceState[Any]) -> bool:
        """Tell whether anything was loaded of an object that has no write id.

        One that is expired, and assigned to without being read, has nothing of any age.
        """
        return any(was_loaded(state, key) for key in self._aging)

    def _refuse_part(self, state: InstanceState[Any]) -> NoReturn:
        """Refuse an object that was loaded without its write id: its age will never be known."""
        raise UnfencedWriteError(
            f"this {state.mapper.class_.__name__} was loaded without {WRITE_COLUMN}, so that its age is "
            f"not known: load that with the rest, or load it again"
        )

    def _load_with_key(self, state: InstanceState[Any], current: dict[str, Any]) -> None:
        """Load an expired object now, as the unit of work is about to, which needs its key.

        The fence comes with it then, and is not loaded over the one that is stamped.
        """
        for key in self._key:
            if key not in current:
                manager: Mapping[str, Any] = state.manager
                manager[key].impl.get(state, current)

    def _note_loaded(
        self, tokens: Tokens, state: InstanceState[Any], current: dict[str, Any], write_id: int | None
    ) -> None:
        """Note the id that an object was loaded with, by the key with which its row will be named."""
        loaded = tokens.loaded
        if loaded is None:  # this object is flushed without a plan that could be noted
            return
        assigned = state.committed_state
        try:
            if assigned.keys().isdisjoint(self._key):
                loaded.note(self._key_in(current), write_id)
            else:
                loaded.note(self._key_in({**current, **assigned}), write_id)
                loaded.moved[self._key_in(current)] = write_id
        except KeyError:  # it was expired by its name
            self._load_with_key(state, current)
            self._note_loaded(tokens, state, current, write_id)

    def _resource_of(self, state: InstanceState[Any]) -> str | None:
        """Return which resource guards an object, by its key alone."""
        template = self._fenced.template
        if state.key is None:
            return None
        key = dict(zip(self._fenced.table.primary_key, state.key[1], strict=True))
        return template.render([key[column] for column in template.columns.values()])

    def _token_for(
        self, flush: Flush, tokens: Tokens, state: InstanceState[Any], current: Mapping[str, Any]
    ) -> int:
        """Return the token to write an object with."""
        fenced = self._fenced
        try:
            values = loaded_values(self._naming, state, current)
            if values is None:
                self._refuse_null(state, current)
                return tokens.of_new_row()
            if self._looked_up and state.key is not None:
                flush.known.setdefault(fenced, {})[state.key[1]] = values
            return tokens.of_row(values)
        except FenceError as error:
            report(error, table=fenced.name)
            raise

    def _refuse_null(self, state: InstanceState[Any], current: Mapping[str, Any]) -> None:
        """Refuse a row whose resource has no name, and will have none."""
        template = self._fenced.template
        for name, column in zip(self._naming, template.columns.values(), strict=True):
            comes_later = state.key is None and (
                column.primary_key or column.default is not None or column.server_default is not None
            )
            if current.get(name) is None and column.nullable and not comes_later:
                raise UnfencedWriteError(
                    f"{name} of this row of {self._fenced.name!r} is NULL, so that {template.text!r} names "
                    f"no resource and no lease can guard the row: name the resource by columns that are "
                    f"never NULL, such as the primary key, or give {name} a value that stands for none"
                )

    def _writes_row(self, state: InstanceState[Any], current: Mapping[str, Any]) -> bool:
        """Tell whether the unit of work will write the fenced row of a dirty object by itself."""
        comparing = self._comparing
        if not comparing:  # for the first time: the attributes have been made since the mapper was
            known: Mapping[str, Any] = state.manager
            comparing.update({key: _comparison(known[key].impl) for key in self._in_row & known.keys()})
        for key, loaded in state.committed_state.items():
            is_equal = comparing.get(key)
            if is_equal is not None and is_equal(current.get(key), loaded) is not True:
                return True
        return False


def _comparison(attribute: Any) -> Callable[[Any, Any], Any]:
    """Return what tells whether two values of an attribute are equal, as the unit of work does."""
    by_type = attribute.is_equal
    return operator.eq if getattr(by_type, "__func__", None) is TypeEngine.compare_values else by_type


def _has_changed(state: InstanceState[Any], current: dict[str, Any]) -> bool:
    """Tell whether anything of a dirty object is to be written: a column, a link or a collection."""
    manager = state.manager
    for key, loaded in tuple(state.committed_state.items()):
        if key == FENCE_COLUMN:
            continue
        impl: Any = manager[key].impl
        if impl.collection or impl.uses_objects:
            history = impl.get_history(state, current, _CHANGES_ONLY)
            if (history.added or history.deleted) and not manager[key].property.viewonly:
                return True
        elif key not in current or impl.is_equal(current[key], loaded) is not True:
            return True
    return False


def on_insert_undone(_session: Session, instance: object) -> None:
    """Have an object whose row is not there have no fence."""
    state: InstanceState[Any] = inspect(instance)
    if fenced_table_of(state) is not None:
        for name in (FENCE_COLUMN, WRITE_COLUMN):
            state.dict.pop(name, None)
