"""What a fenced model's objects know of the write that they were loaded from.

`last_write_id` is loaded with whatever else is loaded of an object, and an object that is of two versions
gets an id that no row has. What public events cannot do, `always_load` and `load_with` of `_sqlalchemy` do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import InstanceState, Mapper

from fencelock.guard._sqlalchemy import always_load, left_out_of
from fencelock.guard._tables import WRITE_COLUMN
from fencelock.guard.objects import was_loaded
from fencelock.guard.sessions import moved_by
from fencelock.guard.write_ids import MIXED, moved


def watch_loads(mapper: Mapper[Any]) -> None:
    """Listen to what is loaded of a fenced model, and assigned to its write ids."""
    event.listen(mapper, "mapper_configured", _on_configured)
    event.listen(mapper.class_manager, "refresh", _on_refresh, raw=True)


def _on_configured(mapper: Mapper[Any], model: Any) -> None:
    always_load(mapper, mapper.columns[WRITE_COLUMN])
    event.listen(getattr(model, WRITE_COLUMN), "set", _on_set, retval=True)


def _on_set(_target: object, value: Any, old: Any, _initiator: object) -> Any:
    """Have an assignment, or a merge, of another version leave an object that is of neither."""
    if not isinstance(value, int):
        return MIXED
    return value if value == old or not isinstance(old, int) else MIXED


def _on_refresh(state: InstanceState[Any], context: Any, names: Collection[str] | None) -> None:
    """Have an object of which only a part is loaded anew be of two versions; or follow a statement."""
    current = state.dict
    if context is None:  # an UPDATE by criteria is applied to the objects that it has matched
        by = moved_by(state.session)
        if by and isinstance(current.get(WRITE_COLUMN), int):
            current[WRITE_COLUMN] = moved(current[WRITE_COLUMN], by)
        return
    for made in state.mapper.composites:
        if names is None or not {column.key for column in made.props}.isdisjoint(names):
            current.pop(made.key, None)  # made anew, from the columns
    if names is None:
        left_out = left_out_of(context, state.mapper)
    else:
        left_out = set(state.mapper.columns.keys()) - set(names) if WRITE_COLUMN in names else set()
    if any(was_loaded(state, key) for key in left_out):
        current[WRITE_COLUMN] = MIXED
