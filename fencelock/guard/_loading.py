"""Keeps the fence of an object as old as the rest of it, since what is written was computed from that.

So each query of a fenced model loads the fence, and a later load or a merge does not make it newer than
attributes that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy.orm import ColumnProperty, MappedSQLExpression, Mapper
from sqlalchemy.orm.base import NO_VALUE
from sqlalchemy.sql import ColumnElement

from fencelock.guard._tables import FENCE_COLUMN
from fencelock.guard.session import lasting_fence, loaded_fence, reads_to_note

_Getter = Callable[[Any], Any]
_Note = Callable[[Any, int | None], None]


def _unknown(_row: Any) -> None:
    """Return the fence of an object that a query loads without it.

    Loaded later, it could be newer than the rest of the object.
    """


class _FenceProperty(ColumnProperty[Any]):
    """The attribute of the fence, once its model is mapped.

    What an object was computed from is as old as its fence says, if the fence is not newer than any of the
    other attributes. So it is loaded with them whatever they are (as the primary key is), and never later.
    """

    __slots__ = ()
    inherit_cache = True

    def _get_context_loader(self, context: Any, path: Any) -> None:
        """Return None: no option of a query, as `load_only`, `defer` or `raiseload`, is for the fence."""

    def merge(
        self,
        _session: Any,
        source_state: Any,
        source_dict: Any,
        dest_state: Any,
        dest_dict: Any,
        load: bool,
        _recursive: Container[Any],
        _resolve_conflict_map: Any,
    ) -> None:
        """Have the fence of a merged object count if it was loaded; one made by hand has none to speak of.

        What differs, or was changed since it was loaded, is written in any case, whatever it comes to in the
        end. It may happen to be what the row has by now, and was computed from an older state all the same.
        And of two objects with one fence, or where the newer one is merged, what the other was loaded with is
        not what the row has.
        """
        fence = source_dict.get(self.key)
        if source_state.key is None or fence is None:
            return
        fence = lasting_fence(source_state, fence)
        mapper = dest_state.mapper  # of a subclass, maybe
        loaded = {**dest_dict, **dest_state.committed_state}
        changed = source_state.committed_state
        for key in source_dict.keys() & {each.key for each in mapper.column_attrs} - {self.key}:
            is_equal = dest_state.manager[key].impl.is_equal
            if key in changed or (key in loaded and is_equal(loaded[key], source_dict[key]) is not True):
                dest_state.committed_state[key] = NO_VALUE
        for made in mapper.composites:  # anew, from the columns
            dest_dict.pop(made.key, None)
        known = loaded_fence(dest_state, dest_dict)
        under_way = _recursive if load else ()
        older = [key for key in _not_merged(mapper, source_state, under_way) if key in dest_dict]
        if known is None or fence is None or fence <= known or _load_again(dest_state, dest_dict, older):
            dest_state.committed_state.pop(self.key, None)
            dest_dict[self.key] = fence

    def setup(self, context: Any, query_entity: Any, path: Any, adapter: Any, **kwargs: Any) -> None:
        """Have a query select the column, and ask for each execution how to load it."""
        super().setup(context, query_entity, path, adapter, **kwargs)
        memoized: dict[Any, Any] = kwargs["memoized_populators"]
        if isinstance(memoized.get(self), ColumnElement):  # else a mark, for what is not loaded
            del memoized[self]

    def create_row_processor(  # noqa: PLR0917  SQLAlchemy's signature
        self,
        context: Any,
        query_entity: Any,
        path: Any,
        mapper: Any,
        result: Any,
        adapter: Any,
        populators: dict[str, list[tuple[str, Any]]],
    ) -> None:
        """Say how the column gets from a row into an object."""
        known = context.compile_state.attributes
        getter: _Getter | None = known.get((self, path.natural_path))
        if getter is None:
            before = len(populators["quick"])
            super().create_row_processor(context, query_entity, path, mapper, result, adapter, populators)
            if len(populators["quick"]) == before:  # the query does not load it
                populators["expire"].remove((self.key, True))
                self._populate(_unknown, context, mapper, populators)
                return
            getter = known[self, path.natural_path] = populators["quick"].pop()[1]
        connection = getattr(result, "connection", None)
        note = None if connection is None else reads_to_note(connection)
        self._populate(getter, context, mapper, populators, note)

    def _populate(
        self,
        getter: _Getter,
        context: Any,
        mapper: Any,
        populators: Mapping[str, list[tuple[str, Any]]],
        note: _Note | None = None,
    ) -> None:
        """Have the fence be read from each row by this, and noted."""
        if context.populate_existing or context.refresh_state is not None or mapper.always_refresh:
            populators["new"].append((self.key, self._replacing(getter, mapper, populators, note)))
        elif note is not None:
            populators["new"].append((self.key, self._noting(getter, note)))
        else:
            populators["quick"].append((self.key, getter))

    def _noting(self, getter: _Getter, note: _Note) -> Callable[[Any, dict[str, Any], Any], None]:
        """Return what loads the fence into an object, and notes it."""

        def populate(state: Any, attributes: dict[str, Any], row: Any) -> None:
            fence = attributes[self.key] = getter(row)
            note(state, fence)

        return populate

    def _replacing(
        self,
        getter: _Getter,
        mapper: Any,
        populators: Mapping[str, Iterable[tuple[str, Any]]],
        note: _Note | None,
    ) -> Callable[[Any, dict[str, Any], Any], None]:
        """Return what loads the fence into an object that the session may have had, and is to load anew.

        Where the query leaves out a column (`load_only`) that the object has from before, the fence stays.
        What it leaves out of relationships is loaded again later; so are columns where the fence was expired.
        """
        left_out: set[str] | None = None
        unrelated: list[str] = []

        def populate(state: Any, attributes: dict[str, Any], row: Any) -> None:
            nonlocal left_out, unrelated
            fence, known = getter(row), attributes.get(self.key)
            if note is not None:
                note(state, fence)
            if left_out is None:  # the first row: by now it is known how each of the others is loaded
                left_out = set(mapper.columns.keys()) - {self.key, *dict(populators["quick"])}
                related = {key for kind in ("new", "existing", "eager") for key, _ in populators[kind]}
                unrelated = [key for key in mapper.relationships.keys() if key not in related]  # noqa: SIM118
            for made in state.mapper.composites:  # anew, from the columns
                attributes.pop(made.key, None)
            if known is not None and not left_out.isdisjoint(attributes):
                return
            older = [key for key in (*unrelated, *left_out) if key in attributes]
            if fence == known or not older or _load_again(state, attributes, older):
                attributes[self.key] = fence

        return populate


class _FenceExpression(MappedSQLExpression[Any], _FenceProperty):
    """The same where the column is mapped by `deferred()` or `column_property()`."""

    __slots__ = ()
    inherit_cache = True


def _not_merged(mapper: Mapper[Any], source: Any, under_way: Container[Any]) -> Iterator[str]:
    """Yield the attributes that a merge leaves as they were.

    Among them are relationships whose other side is being merged, from where it has come to this object.
    """
    yield from (each.key for each in mapper.column_attrs if each.key not in source.dict)
    for each in mapper.relationships:
        reverses = each._reverse_property  # noqa: SLF001  no public way to ask
        is_skipped = any((source, reverse) in under_way for reverse in reverses)
        if is_skipped or each.key not in source.dict or not each.cascade.merge:
            yield each.key


def _load_again(state: Any, attributes: dict[str, Any], older: list[str]) -> bool:
    """Have what a merge or query does not bring be loaded again, for it is older; tell whether it can be.

    What was changed cannot. Then the object keeps the older fence.
    """
    if not state.committed_state.keys().isdisjoint(older):
        return False
    state._expire_attributes(attributes, older)  # noqa: SLF001  as SQLAlchemy does where it merges
    return True


def watch_loads(mapper: Mapper[Any]) -> None:
    """Have what is loaded of a fenced model keep its fence."""
    fence = mapper.get_property(FENCE_COLUMN)
    if isinstance(fence, ColumnProperty) and not isinstance(fence, _FenceProperty):
        fence.__class__ = _FenceExpression if isinstance(fence, MappedSQLExpression) else _FenceProperty
        fence.deferred = False
        fence.strategy_key = (("deferred", False), ("instrument", True))
