"""Private names of SQLAlchemy that have no public twin, each in a function that says what it is for."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Mapper


def always_load(mapper: Mapper[Any], column: Any) -> None:
    """Have `load_only()` and `defer("*")` not leave a column out; nor do they leave out the primary key."""
    name = "_should_undefer_in_wildcard"
    vars(mapper)[name] = {*getattr(mapper, name), column}
    mapper._memoized_keys -= {name}  # noqa: SLF001  else it is gone with the next class attribute, as pickle sets


def left_out_of(context: Any, mapper: Mapper[Any]) -> set[str]:
    """Return the columns that a query leaves as they are in an object that it loads anew."""
    said: dict[bool, set[Any]] = {False: set(), True: set()}
    for path, each in getattr(getattr(context, "compile_state", None), "attributes", {}).items():
        strategy = getattr(each, "strategy", None) or ()
        if strategy and strategy[0][0] == "deferred":
            said[strategy[0][1]].add(getattr(path[1][-1], "key", None))  # None stands for all
    if not said[True]:
        return set()
    undeferred = mapper._should_undefer_in_wildcard  # noqa: SLF001  as above
    always = {mapper.get_property_by_column(column).key for column in undeferred}
    columns = set(mapper.columns.keys())
    return (columns if None in said[True] else said[True] & columns) - said[False] - always


def keeps_order(statement: Any) -> bool:
    """Tell whether an UPDATE was given its values by ordered_values(), which takes no others beside them."""
    old = getattr(statement, "_ordered_values", None)
    return bool(old or getattr(statement, "_maintain_values_ordering", None))
