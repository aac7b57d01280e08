"""Private names and replaced methods of SQLAlchemy, each under a name that tells its purpose.

Because of these, the version of SQLAlchemy has an upper bound. `tests/guard/test_private_names.py` tests that
each behaves as the guard expects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from operator import attrgetter, methodcaller
from typing import Any

from sqlalchemy import Delete, Insert, Select, Update
from sqlalchemy.engine import Connection, CursorResult, Transaction
from sqlalchemy.orm import ColumnProperty, InstanceState, Mapper, loading

# ruff: noqa: SLF001

executes_flush = attrgetter("_warn_on_events")
"""Whether a session executes the statements of a flush. A bulk operation is no flush."""
refuse_inactive: Callable[[Connection], Any] = methodcaller("_invalid_transaction")
"""Raises the error that SQLAlchemy raises for a statement if the connection's transaction is not active."""
options_to_execute = attrgetter("_execution_options")
"""The execution options of a statement or connection, without a copy."""
prefixes_of = attrgetter("_prefixes")  # the prefixes that prefix_with() has added to a statement
options_of = attrgetter("_with_options")  # the options that options() has added to a statement
parameters_of = attrgetter("_bindparams")  # the parameters of a text by name
doubles_percents = attrgetter("_double_percents")
"""Whether an identifier preparer writes a percent sign twice for this driver."""
isolation_on_connect = attrgetter("_on_connect_isolation_level")
"""The isolation_level that `create_engine` was given, read from the engine's dialect; or None."""
execute_unguarded: Callable[..., CursorResult[Any]] = Connection._execute_clauseelement
"""Executes a statement without the guard, with these execution options."""
cache_of = attrgetter("base_mapper._compiled_cache")
"""The cache of a mapper's compiled statements. Only the unit of work executes statements with this cache."""


def hear_ends(heard: Callable[..., object]) -> None:
    """Call `heard(transaction, error, commits=…)` after a transaction or savepoint was told to end.

    SQLAlchemy's engines have an event before a COMMIT, and none after it. A session's events do not see a
    transaction that the session has joined. The three methods are public, but not meant to be replaced.
    """

    def telling(end: Callable[[Transaction], None], *, commits: bool) -> Callable[[Transaction], None]:
        @wraps(end)
        def ending(transaction: Transaction) -> None:
            try:
                end(transaction)
            except BaseException as error:
                heard(transaction, error, commits=commits)
                raise
            heard(transaction, None, commits=commits)

        return ending

    for name in ("commit", "rollback", "close"):
        setattr(Transaction, name, telling(getattr(Transaction, name), commits=name == "commit"))


def execute_by(kind: Any, around: Callable[[Any], Any]) -> None:
    """Let `around(method)` replace the method by which statements of a class execute themselves."""
    kind._execute_on_connection = around(kind._execute_on_connection)


def where_of(statement: Any) -> tuple[Any, ...]:
    """Return the parts of a WHERE clause; none for an INSERT."""
    found: tuple[Any, ...] = getattr(statement, "_where_criteria", ())
    return found


def emits(statement: Any, table: Any) -> bool:
    """Tell whether a statement of the ORM for a list of keys is sent to this table of its model."""
    return statement._annotations.get("_emit_update_table") is table


def with_where(statement: Update | Delete, parts: Iterable[Any]) -> Update | Delete:
    statement = statement._generate()
    statement._where_criteria = tuple(parts)
    return statement


def values_in(statement: Update | Delete | Insert) -> Iterator[tuple[Any, Any]]:
    """Yield the columns (or their keys) to which a statement itself assigns values, and the values."""
    yield from (getattr(statement, "_values", None) or {}).items()
    yield from getattr(statement, "_ordered_values", None) or ()  # SQLAlchemy 2.0


def with_values(statement: Update, values: dict[Any, Any]) -> Update:
    """Return an UPDATE with more values; `values()` refuses one that has `ordered_values()`."""
    if old := getattr(statement, "_ordered_values", None):  # SQLAlchemy 2.0
        statement = statement._generate()
        setattr(statement, "_ordered_values", [*old, *values.items()])  # noqa: B010  mypy knows 2.1 only
        return statement
    if not getattr(statement, "_maintain_values_ordering", None):
        return statement.values(values)
    plain = statement._generate()
    plain._maintain_values_ordering = False
    more = plain.values(values)
    more._maintain_values_ordering = True
    return more


def inserts_plainly(statement: Insert) -> bool:
    """Tell whether an INSERT has no ON CONFLICT or other addition, no prefix, and no list in values()."""
    return not (statement._post_values_clause is not None or statement._prefixes or has_rows(statement))


def has_rows(statement: Insert | Update) -> bool:
    """Tell whether a statement got a list in values(), which SQLAlchemy refuses for an UPDATE."""
    return bool(statement._multi_values)


def locks_rows(query: Select[Any]) -> bool:
    return query._for_update_arg is not None


def equal_to_parents(mapper: Mapper[Any]) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of columns that join a mapper's table to its parent's."""
    pairs: Any = mapper._inherits_equated_pairs if mapper.inherits else ()
    return pairs or ()


def always_load(mapper: Mapper[Any], column: Any) -> None:
    """Make queries load a column in spite of `load_only()` and `defer("*")`, like the primary key."""
    name = "_should_undefer_in_wildcard"
    vars(mapper)[name] = {*getattr(mapper, name), column}
    mapper._memoized_keys -= {name}  # else SQLAlchemy resets it when a class attribute is set, as pickle does


def load_with(name: str) -> None:
    """Make the SELECTs that load a part of an object load this attribute as well.

    Parts are loaded by a deferred column, by `Session.refresh(instance, names)`, and by
    `selectin_polymorphic()` for sub-tables.
    """

    def wanted(state: InstanceState[Any], names: Iterable[str]) -> Iterable[str]:
        return {*names, name} if name in state.manager else names

    def with_names(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def loading_more(mapper: Mapper[Any], state: InstanceState[Any], names: Any, *rest: Any) -> Any:
            return load(mapper, state, wanted(state, names), *rest)

        return loading_more

    def with_refreshed(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def loading_more(*given: Any, **options: Any) -> Any:
            if options.get("refresh_state") is not None and options.get("only_load_props"):
                options["only_load_props"] = wanted(options["refresh_state"], options["only_load_props"])
            return load(*given, **options)

        return loading_more

    for function, around in (("load_scalar_attributes", with_names), ("load_on_ident", with_refreshed)):
        own = function if hasattr(loading, function) else f"_{function}"  # SQLAlchemy 2.0, or 2.1
        setattr(loading, own, around(getattr(loading, own)))
    of_sub_table: Callable[..., Any] = Mapper._subclass_load_via_in

    @wraps(of_sub_table)
    def with_sub_table(*given: Any) -> tuple[Any, Any, Any]:
        query, wanting, leaving_out = of_sub_table(*given)
        leaving_out.context = tuple(
            [each for each in leaving_out.context if getattr(each.path.path[-1], "key", None) != name]
        )
        return query, wanting, leaving_out

    setattr(Mapper, "_subclass_load_via_in", with_sub_table)  # noqa: B010  mypy refuses an assignment


def _populators(
    name: str, read: Callable[[Any], Any] | None, heard: Callable[..., Any]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two populators: one takes the value of a row, the other only compares it with the object's."""

    def take(state: InstanceState[Any], current: dict[str, Any], row: Any) -> None:
        kept = compare(state, current, row)
        if read is not None:
            current[name] = kept

    def compare(state: InstanceState[Any], current: dict[str, Any], row: Any) -> Any:
        before, found = current.get(name), read and read(row)
        return found if before == found else heard(state, before, found)

    return take, compare


class _Unnoticed(list[Any]):
    """Populators that are true if there is another one than ours.

    Else SQLAlchemy sends the event `refresh`, without attributes, for each object that a query finds again.
    """

    def __bool__(self) -> bool:
        return len(self) > 1


def hear_rows(
    name: str,
    heard: Callable[[Any, InstanceState[Any], Any, Any], Any],
    loading_in: Callable[[Any], Callable[[InstanceState[Any]], object] | None],
) -> None:
    """Call `heard(context, state, before, found)` if a row and its loaded object differ in an attribute.

    None stands for a missing value. If the query refreshes the attribute, it gets the result of `heard`.
    If `loading_in(session)` returns a function, that is called with each object that the query loads.
    """
    setup = ColumnProperty.setup
    create: Any = ColumnProperty.create_row_processor

    @wraps(setup)
    def setting_up(prop: ColumnProperty[Any], *given: Any, **options: Any) -> None:
        setup(prop, *given, **options)
        if prop.key == name:  # so that `create_row_processor` is called
            options["memoized_populators"].pop(prop, None)

    @wraps(create)
    def creating(prop: Any, *given: Any) -> None:
        if prop.key != name:
            create(prop, *given)
            return
        context, query_entity, path, *others, populators = given
        own: dict[str, list[Any]] = defaultdict(list)
        plain = prop._get_strategy((("deferred", False), ("instrument", True)))
        plain.create_row_processor(context, query_entity, path, None, *others, own)
        read = own.pop("quick")[0][1] if "quick" in own else None
        if read is None:  # the query does not load the attribute
            own.clear()
            create(prop, *given[:-1], own)
        again = context.populate_existing or prop.parent.always_refresh or context.refresh_state is not None
        take, compare = _populators(name, read, partial(heard, context))
        if again:
            own["new"].append((name, take))
        elif read is not None:  # only for new objects
            own["quick"].append((name, read))
        if (note := loading_in(context.session)) is not None:
            own["new"].append((name, lambda state, _current, _row: note(state)))
        for kind, each in own.items():
            populators[kind].extend(each)
        populators["eager"] = _Unnoticed([*populators["eager"], (name, compare)])

    setattr(ColumnProperty, "setup", setting_up)  # noqa: B010  mypy refuses an assignment
    setattr(ColumnProperty, "create_row_processor", creating)  # noqa: B010


def hear_merges(name: str, heard: Callable[..., None]) -> None:
    """Call `heard(given, given_values, into, into_values)` when an attribute of this name was merged.

    SQLAlchemy has no event for `Session.merge()`. `ColumnProperty.merge` is not meant to be replaced.
    """
    merge: Callable[..., None] = ColumnProperty.merge

    @wraps(merge)
    def merging(prop: ColumnProperty[Any], session: object, *given: Any) -> None:
        merge(prop, session, *given)
        if prop.key == name:
            heard(*given[:4])

    setattr(ColumnProperty, "merge", merging)  # noqa: B010  mypy refuses an assignment


def left_out_of(context: Any, mapper: Mapper[Any]) -> set[str]:
    """Return the columns that a query does not refresh in an object that the session already has."""
    said: dict[bool, set[Any]] = {False: set(), True: set()}
    for path, each in getattr(getattr(context, "compile_state", None), "attributes", {}).items():
        strategy = getattr(each, "strategy", None) or ()
        if strategy and strategy[0][0] == "deferred":
            said[strategy[0][1]].add(getattr(path[1][-1], "key", None))  # None stands for all columns
    if not said[True]:
        return set()
    undeferred = mapper._should_undefer_in_wildcard
    always = {mapper.get_property_by_column(column).key for column in undeferred}
    columns = set(mapper.columns.keys())
    return (columns if None in said[True] else said[True] & columns) - said[False] - always
