"""Private names of SQLAlchemy that have no public twin, each in a function that says what it is for.

The version of SQLAlchemy is capped because of them. `tests/guard/test_private_names.py` shows that each does
what is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from sqlalchemy import Column, Delete, Insert, Select, Table, TextClause, Update
from sqlalchemy.engine import Connection, CursorResult, NestedTransaction, Transaction
from sqlalchemy.orm import InstanceState, Mapper, Session, SessionTransaction, loading
from sqlalchemy.sql.lambdas import LambdaElement

# ruff: noqa: SLF001

# Sessions and transactions.


def is_flushing(session: Session) -> bool:
    """Tell whether a session flushes at this moment, bulk operations included."""
    return session._flushing


def executes_flush(session: Session) -> bool:
    """Tell whether a session executes the statements of a flush; a bulk operation is none."""
    return session._warn_on_events


def taking_part_in(transaction: SessionTransaction) -> list[tuple[Connection, Transaction, bool]]:
    """Return a session's connections, their transactions, and which of these the session commits."""
    known: Mapping[Any, Any] = transaction._connections
    each_once = dict.fromkeys(known.values())  # under the connection, and under its engine
    return [(connection, inner, commits) for connection, inner, commits, _ in each_once]


def fail_inside(transaction: SessionTransaction, error: Exception) -> None:
    """Have a session's transaction need a rollback for this error, as a flush that fails does."""
    transaction._begin().rollback()
    transaction._rollback_exception = error


def look_active(transaction: SessionTransaction) -> None:
    """Have a `with` block commit a session's transaction that is not active, so that it raises."""
    transaction._transaction_is_active = lambda: True  # type: ignore[method-assign]


def refuse_inactive(connection: Connection) -> None:
    """Raise what executing on a connection raises whose transaction is not active."""
    connection._invalid_transaction()


def savepoint_name(savepoint: NestedTransaction) -> str:
    """Return what a savepoint is called: the object would keep its transaction alive."""
    return savepoint._savepoint


def outer_of(savepoint: NestedTransaction) -> NestedTransaction | None:
    """Return the savepoint around a savepoint."""
    return savepoint._previous_nested


def roll_back_to(savepoint: NestedTransaction) -> None:
    """Roll back to a savepoint in the database, and leave SQLAlchemy's object as it is."""
    savepoint.connection._rollback_to_savepoint_impl(savepoint._savepoint)


# The execution of statements.


def execute_by(kind: Any, around: Callable[[Any], Any]) -> None:
    """Have statements of a kind execute themselves by what this returns for the way they do it now."""
    kind._execute_on_connection = around(kind._execute_on_connection)


def execute_unguarded(
    connection: Connection, statement: Any, rows: Sequence[Mapping[str, Any]], options: Any
) -> CursorResult[Any]:
    """Execute a statement as it would do itself, with these execution options."""
    return connection._execute_clauseelement(statement, rows, options)


def options_to_execute(target: Any) -> Any:
    """Return the execution options of a statement or connection, without a copy."""
    return target._execution_options


def has_listeners(connection: Connection) -> bool:
    """Tell whether a listener may change what a connection executes."""
    return connection._has_events or bool(connection.engine._has_events)


# The parts of statements.


def where_of(statement: Any) -> tuple[Any, ...]:
    """Return the parts of a WHERE clause; none for an INSERT."""
    found: tuple[Any, ...] = getattr(statement, "_where_criteria", ())
    return found


def with_where(statement: Update | Delete, parts: Iterable[Any]) -> Update | Delete:
    """Return the statement with these parts as its WHERE clause instead."""
    statement = statement._generate()
    statement._where_criteria = tuple(parts)
    return statement


def values_in(statement: Update | Delete | Insert) -> Iterator[tuple[Any, Any]]:
    """Return the columns (or their keys) that a statement itself assigns, and the values."""
    yield from (getattr(statement, "_values", None) or {}).items()
    yield from getattr(statement, "_ordered_values", None) or ()  # SQLAlchemy 2.0


def keeps_order(statement: Any) -> bool:
    """Tell whether an UPDATE was given its values by ordered_values(), which takes no others beside them."""
    old = getattr(statement, "_ordered_values", None)
    return bool(old or getattr(statement, "_maintain_values_ordering", None))


def prefixes_of(statement: Update | Delete | Insert) -> tuple[Any, ...]:
    """Return what prefix_with() has added."""
    return statement._prefixes


def options_of(statement: Update | Delete) -> tuple[Any, ...]:
    """Return what options() has added."""
    return statement._with_options


def sources_of(part: Any) -> Iterable[Any]:
    """Return the tables that a part of a WHERE clause reads, subqueries apart."""
    found: Iterable[Any] = part._from_objects
    return found


def has_rows(statement: Insert) -> bool:
    """Tell whether values() was given several rows."""
    return bool(statement._multi_values)


def has_conflict_clause(statement: Insert) -> bool:
    """Tell whether an INSERT says what to do with a row that exists."""
    return statement._post_values_clause is not None


def locks_rows(query: Select[Any]) -> bool:
    """Tell whether a query was given with_for_update()."""
    return query._for_update_arg is not None


def parameters_of(statement: TextClause) -> Mapping[str, Any]:
    """Return the parameters of a text by name."""
    return statement._bindparams


def copy_of(statement: TextClause) -> TextClause:
    """Return a text with the same parameters."""
    return statement._generate()


def resolved(statement: LambdaElement) -> Any:
    """Return the statement that a lambda returns."""
    return statement._resolved


def doubles_percents(preparer: Any) -> bool:
    """Tell whether a percent sign is written twice for this driver."""
    return bool(preparer._double_percents)


# Mappers.


def cache_of(mapper: Mapper[Any]) -> object:
    """Return the compiled cache of the unit of work's own statements: none but those are executed with it."""
    return mapper._compiled_cache


def processors_of(mapper: Mapper[Any]) -> list[Any]:
    """Return what the unit of work calls when the first object of a mapper comes into a flush."""
    return mapper._dependency_processors


def key_in_table(mapper: Mapper[Any], table: Table) -> Iterable[Column[Any]]:
    """Return the key of a mapper's rows in one of its tables, as the unit of work's statements have it."""
    found: Any = mapper._pks_by_table[table]
    return found  # type: ignore[no-any-return]


def parameter_of(column: Column[Any]) -> str | None:
    """Return the parameter by which a statement of the unit of work names a row."""
    return column._label


def equal_to_parents(mapper: Mapper[Any]) -> Iterable[tuple[Any, Any]]:
    """Return the pairs of columns by which a mapper is joined to the one that it inherits from."""
    pairs: Any = mapper._inherits_equated_pairs if mapper.inherits else ()
    return pairs or ()


def always_load(mapper: Mapper[Any], column: Any) -> None:
    """Have `load_only()` and `defer("*")` not leave a column out; nor do they leave out the primary key."""
    name = "_should_undefer_in_wildcard"
    vars(mapper)[name] = {*getattr(mapper, name), column}
    mapper._memoized_keys -= {name}  # else it is gone with the next class attribute, as pickle sets


def load_with(name: str) -> None:
    """Have a SELECT of a part of an object load an attribute as well, where the object does not have it.

    Such a SELECT is that of a deferred column or of `Session.refresh(instance, names)`.
    """

    def wanted(state: InstanceState[Any], names: Iterable[str]) -> Iterable[str]:
        return names if name in state.dict or name not in state.manager else {*names, name}

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


def left_out_of(context: Any, mapper: Mapper[Any]) -> set[str]:
    """Return the columns that a query leaves as they are in an object that it loads anew."""
    said: dict[bool, set[Any]] = {False: set(), True: set()}
    for path, each in getattr(getattr(context, "compile_state", None), "attributes", {}).items():
        strategy = getattr(each, "strategy", None) or ()
        if strategy and strategy[0][0] == "deferred":
            said[strategy[0][1]].add(getattr(path[1][-1], "key", None))  # None stands for all
    if not said[True]:
        return set()
    undeferred = mapper._should_undefer_in_wildcard
    always = {mapper.get_property_by_column(column).key for column in undeferred}
    columns = set(mapper.columns.keys())
    return (columns if None in said[True] else said[True] & columns) - said[False] - always
