"""Knows which tables are fenced, and which resource guards each of their rows; executes no SQL.

The guard keeps its facts about a table in `Table.info`. They live as long as the table, and `to_metadata`
copies them. "order:1" and "order:01" are two leases, so a value that names a resource is converted or refused
if the database would return it in another form.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import randbelow
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeAlias
from uuid import UUID
from weakref import ReferenceType, WeakSet

import sqlalchemy as sa
from sqlalchemy.sql import ColumnElement, FromClause
from sqlalchemy.sql.selectable import AliasedReturnsRows
from sqlalchemy.types import TypeDecorator, TypeEngine

from fencelock.errors import FenceError, UnfencedWriteError
from fencelock.lease import OBJECT_IN_NAME, check_resource

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Mapper

FENCE_COLUMN: Final = "last_fencing_token"
WRITE_COLUMN: Final = "last_write_id"
FENCE_TABLE: Final = "fencelock_fences"
RECEIPT_TABLE: Final = "fencelock_receipts"
TRANSLATED: Final = "schema_translate_map"  # the execution option that replaces the schemas of tables
LIMIT: Final = 2**53  # write ids are below this number, so that JSON and web forms return them unchanged
NO_VERSION: Final = -1  # the write id of an object whose version is mixed or unknown. No row has this id.


def schema_of(connection: Connection, named: set[str | None]) -> str | None:
    """Return the only schema that the program has named for one of fencelock's tables, else None.

    None stands for the default schema. It is also returned if a `schema_translate_map` has the key None.
    """
    translated = connection.get_execution_options().get(TRANSLATED) or {}
    return next(iter(named)) if len(named) == 1 and None not in translated else None


def new_write_id() -> int:
    """Return a new write id. It does not come from `random`, because two processes may share a seed."""
    return 1 + randbelow(LIMIT - 1)  # never 0: that is the id of rows that were made without the guard


# How write ids change. A flush, an INSERT, an upsert, a claim and a gate set a new id. Most UPDATEs without
# objects add a random number to each id that they find (`conditions.shift_ids`). `sessions.note_shift` keeps
# the number. SQLAlchemy applies such an UPDATE to loaded objects, and `objects._on_refresh` adds the number
# to their ids. So such an object can be written later only if it had the version that the UPDATE has found.


def shifted(write_id: int, by: int) -> int:
    """Return a row's new id after a statement that shifts ids by this number."""
    return (write_id + by) % LIMIT if write_id >= 0 else NO_VERSION


class _Mark:
    """Marks a fence column. It cannot be pickled, because another process may have no guard."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "metadata with a fenced table cannot be pickled, because nothing would guard it where it is "
            "loaded: import the models there"
        )


FENCE_MARK: Final[dict[Any, Any]] = {"fencelock": _Mark()}
WRITE_MARK: Final[dict[Any, Any]] = {"fencelock.write_id": True}
TRIGGER_MARK: Final = "fencelock.trigger"
RESOURCE_MARK: Final = "fencelock.resource"
LEASE_MARK: Final = "fencelock.lease"
EXCLUDED_MARK: Final = "fencelock.excluded"
_MARKS: Final = FENCE_MARK.keys() | {TRIGGER_MARK, RESOURCE_MARK, LEASE_MARK, EXCLUDED_MARK}
_FENCED: Final = "fencelock.fenced"
_SUB_TABLE_OF: Final = "fencelock.sub_table_of"
_OF_TABLE: Final = "fencelock.of"
"""The key in `Column.info` of the name of the table that the fence column was added to first."""
#: The keys in `Table.info` that only the guard uses.
GUARDS_OWN: Final = frozenset({_FENCED, _SUB_TABLE_OF, EXCLUDED_MARK})

FenceTrigger: TypeAlias = bool | Literal["strict"]
"""A table's trigger: False for none, True for one that refuses to lower a fence, or a strict one."""

FenceLease: TypeAlias = Literal["required", "optional"]
"""Whether a write without a lease is refused, or allowed if its row has the loaded version."""

NO_LEASE: Final = 0
"""The token of a write under no lease, which keeps the fence.

Also the fence of a new row whose key the database makes.
"""


@dataclass(frozen=True, slots=True)
class ResourceTemplate:
    """`__fence_resource__`, such as `"order:{id}"`, and the column behind each name in braces."""

    text: str
    columns: Mapping[str, sa.Column[Any]]

    def render(self, values: Sequence[Any]) -> str:
        named = zip(self.columns.items(), values, strict=True)
        spelt = {name: spelling(column, value) for (name, column), value in named}
        try:
            return self.text.format_map(spelt)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"__fence_resource__ = {self.text!r} cannot be rendered with {spelt!r}: {error}"
            ) from error

    def refuse_fractions(self, values: Sequence[Any]) -> None:
        """Refuse a time with a fraction of a second that MariaDB or MySQL would not store."""
        for (name, column), value in zip(self.columns.items(), values, strict=True):
            if getattr(value, "microsecond", 0) and not getattr(column.type, "fsp", None):
                raise UnfencedWriteError(
                    f"{name}={value!r} names the resource of a row, and the column stores whole seconds: "
                    "round the value, or give the column the type DATETIME(fsp=6) or TIME(fsp=6) of "
                    "sqlalchemy.dialects.mysql"
                )

    def match(self, resource: str) -> re.Match[str] | None:
        """Return the match of a resource's name, with a group for each field; None for another form."""
        parts = Formatter().parse(self.text)
        pattern = "".join(re.escape(text) + ("" if name is None else "(.+)") for text, name, _, _ in parts)
        return re.fullmatch(pattern, resource, re.DOTALL)

    def parse(self, resource: str) -> tuple[Any, ...] | None:
        """Return the column values in a resource's name; None if the name does not determine them."""
        names: list[str] = []
        for _, name, spec, conversion in Formatter().parse(self.text):
            if name is not None:
                if spec or conversion or name in names:
                    return None
                names.append(name)
        found = self.match(resource)
        if found is None:
            return None
        try:
            by_name = {
                name: self.columns[name].type.python_type(text)
                for name, text in zip(names, found.groups(), strict=True)
            }
            values = tuple([by_name[name] for name in self.columns])
            return values if self.render(values) == resource else None
        except (NotImplementedError, TypeError, ValueError, UnfencedWriteError):
            return None

    @property
    def in_key(self) -> bool:
        return all(column.primary_key for column in self.columns.values())


def _has_many_spellings(kind: TypeEngine[Any]) -> bool:
    if isinstance(kind, sa.Enum):  # MariaDB compares members regardless of case, and of spaces at the end
        return len({each.casefold().rstrip() for each in kind.enums}) < len(kind.enums)
    return isinstance(kind, sa.Numeric | sa.Float) or (isinstance(kind, sa.DateTime) and kind.timezone)


def spelling(column: sa.Column[Any], value: Any) -> Any:
    """Return a value as the database returns it; UnfencedWriteError if that form is not known.

    A database may take "01", 1.0 and True for the key 1, but "order:01" is not the lease of "order:1".
    """
    kind = column.type
    is_as_loaded = True
    try:
        if isinstance(kind, sa.Integer):
            as_text = isinstance(value, str) and value == str(int(value))
            return int(value) if as_text else operator.index(value)
        if isinstance(kind, sa.String) and not isinstance(kind, sa.Enum):
            # PostgreSQL pads CHAR with spaces, and ignores them when it compares.
            return str.__str__(value).rstrip(" ") if isinstance(kind, sa.CHAR) else str.__str__(value)
        if isinstance(kind, sa.Uuid):
            return value if isinstance(value, UUID) else str(UUID(value))
        if isinstance(kind, sa.Enum):  # SQLAlchemy also takes a member's name, MariaDB in upper or lower case
            is_as_loaded = isinstance(value, kind.enum_class) if kind.enum_class else value in kind.enums
        elif not isinstance(kind, TypeDecorator):
            is_as_loaded = type(value) is kind.python_type
    except NotImplementedError:
        pass
    except (TypeError, ValueError):
        is_as_loaded = False
    if is_as_loaded:
        return value
    raise UnfencedWriteError(
        f"{value!r} is compared with {column.name} of {column.table.description!r}, which names the "
        f"resource that guards the row; give it as the type that the column has ({column.type!r})"
    )


@dataclass(eq=False, slots=True)
class FencedTable:
    """The guard's facts about one fenced table. If `is_optional`, rows may be written under no lease."""

    table: sa.Table
    template: ResourceTemplate
    of_models: list[ReferenceType[Mapper[Any]]] = field(default_factory=list)
    name: str = field(init=False)
    fence: sa.Column[int] = field(init=False)
    write: sa.Column[int] = field(init=False)
    is_optional: bool = field(init=False)
    excludes: bool = field(init=False)  # whether the table, or a sub-table, has columns that need no lease
    statements: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = self.table.name
        self.fence = self.table.c[FENCE_COLUMN]
        self.write = self.table.c[WRITE_COLUMN]
        self.is_optional = self.fence.info.get(LEASE_MARK) == "optional"
        self.excludes = bool(excluded_of(self.table))
        for key in excluded_of(self.table):
            self.check_excluded(key, dict(self.table.c.items()))

    def source_of(self, statement: Any) -> FromClause:
        """Return the alias of the table that the statement uses, or the table itself."""
        target: FromClause = statement.table
        return target if isinstance(target, AliasedReturnsRows) else self.table

    def check_excluded(self, name: str, columns: Mapping[str, sa.Column[Any]]) -> sa.Column[Any]:
        """Return an excluded column by its name, which is an attribute's if a model names it."""
        if (column := columns.get(name)) is None:
            raise ValueError(
                f"__fence_excluded__ names {name!r}, but the columns of {self.name!r} are called "
                f"{', '.join(columns)}"
            )
        own = column.name in {FENCE_COLUMN, WRITE_COLUMN}
        if own or column.primary_key or column in self.template.columns.values():
            raise ValueError(
                f"__fence_excluded__ of {self.name!r} names {name!r}, which tells the guard which row is "
                f"written, and by whom: exclude only columns such as counters and times of visits"
            )
        return column

    @property
    def is_strict(self) -> bool:
        """Whether the table's trigger refuses an UPDATE that changes neither fence nor write id."""
        return trigger_of(self.table) == "strict"

    def mappers(self) -> list[Mapper[Any]]:
        return [mapper for reference in self.of_models if (mapper := reference()) is not None]


_names: dict[str, WeakSet[sa.Table]] = {}  # the fenced tables and their sub-tables, by name in lower case


def register(fenced: FencedTable) -> FencedTable:
    fenced.table.info[_FENCED] = fenced
    _note_name(fenced.table)
    return fenced


def register_sub_table(table: sa.Table, base: FencedTable) -> None:
    """Note that a table completes the rows of a fenced one (joined inheritance)."""
    table.info[_SUB_TABLE_OF] = table.name, base
    _note_name(table)


def _note_name(table: sa.Table) -> None:
    _names.setdefault(table.name.lower(), WeakSet()).add(table)


def note_column(column: sa.Column[Any], parent: object) -> None:
    """Note the name of a table as soon as it has a fence column: its first write may be textual SQL.

    A copy of the table under another name, such as a history of its rows, is not fenced.
    """
    if column.name == FENCE_COLUMN and "fencelock" in column.info and isinstance(parent, sa.Table):
        if column.info.setdefault(_OF_TABLE, parent.name) == parent.name:
            _note_name(parent)
        else:
            column.info = {key: mark for key, mark in column.info.items() if key not in _MARKS}


def fenced_names() -> list[str]:
    """Return the names, in lower case, of the fenced tables that are alive, and of their sub-tables.

    A name that is not ASCII is also returned unchanged, because its lower case may not match it ("İ").
    """
    names = [name for name, tables in list(_names.items()) if len(tables)]
    return names + [table.name for name in names if not name.isascii() for table in list(_names[name])]


def excluded_by_name(name: str) -> frozenset[str]:
    """Return the names, in lower case, of the excluded columns of all tables with this name in lower case."""
    found = []
    for each in _names.get(name, ()):
        if len({column.name.lower() for column in each.c}) < len(each.c):  # "Views" and "views"
            return frozenset()
        found.append({each.c[key].name.lower() for key in excluded_of(each)})
    return frozenset(set.intersection(*found)) if found else frozenset()


def new_column(name: str, info: Mapping[Any, Any]) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"), info=dict(info))


def trigger_of(table: sa.Table) -> FenceTrigger:
    fence = table.c.get(FENCE_COLUMN)
    wanted: FenceTrigger = False if fence is None else fence.info.get(TRIGGER_MARK, False)
    return wanted


def excluded_of(table: Any) -> frozenset[str]:
    """Return the keys of the columns in `__fence_excluded__`; a sub-table keeps its own."""
    fence = table.c.get(FENCE_COLUMN)
    marks = table.info if fence is None else fence.info
    excluded: frozenset[str] = marks.get(EXCLUDED_MARK, frozenset())
    return excluded


def exclude(table: sa.Table, keys: Iterable[str]) -> None:
    fence = table.c.get(FENCE_COLUMN)
    marks = table.info if fence is None else fence.info
    marks[EXCLUDED_MARK] = excluded_of(table).union(keys)


def check_names(excluded: object) -> frozenset[str]:
    if isinstance(excluded, str) or not isinstance(excluded, Iterable):
        raise TypeError(f"__fence_excluded__ is a set of names, such as {{'views'}}, not {excluded!r}")
    return frozenset(excluded)


def check_trigger(wanted: object) -> FenceTrigger:
    if wanted is True or wanted is False or wanted == "strict":
        return wanted
    raise ValueError(f"a fence's trigger is False, True or 'strict', not {wanted!r}")


def check_lease(wanted: object) -> FenceLease:
    if wanted == "required" or wanted == "optional":  # noqa: PLR1714  mypy understands only this form
        return wanted
    raise ValueError(f"__fence_lease__ is 'required' or 'optional', not {wanted!r}")


def registered(table: sa.Table | None) -> FencedTable | None:
    """Return the record of exactly this table; None for a copy, and for a table that has no record yet."""
    found: FencedTable | None = getattr(table, "info", {}).get(_FENCED)
    # Annotated tables hash like the original.
    return found if found is not None and (found.table is table or hash(found.table) == hash(table)) else None


def fenced_table(target: object) -> FencedTable | None:
    """Return the record of a table or alias, and make it if necessary; None if the table is not fenced."""
    table = target if type(target) is sa.Table else underlying(target)
    fenced = registered(table)
    if fenced is not None or not isinstance(table, sa.Table):
        return fenced
    fence = table.c.get(FENCE_COLUMN)
    if fence is None or "fencelock" not in fence.info:
        return None
    check_write_column(table, table.name)
    original: FencedTable | None = table.info.get(_FENCED)
    if original is None:  # a Core table, seen for the first time
        return register(FencedTable(table, template_of(table, table.name)))
    columns = {name: table.c[column.key] for name, column in original.template.columns.items()}
    template = ResourceTemplate(original.template.text, columns)
    return register(FencedTable(table, template, list(original.of_models)))


def known(target: FromClause) -> FencedTable:
    """Return the record of a fenced table; ValueError if it has no fence."""
    fenced = fenced_table(target)
    if fenced is not None:
        return fenced
    table = underlying(target)
    if not isinstance(table, sa.Table) or FENCE_COLUMN not in table.c:
        raise ValueError(
            f"{getattr(table, 'name', target)!r} is not fenced: it has no column {FENCE_COLUMN!r}; give the "
            f"model the mixin FencedModel, or the Table a fence_column()"
        )
    template = template_of(table, table.name)
    check_write_column(table, table.name)
    return register(FencedTable(table, template))


def base_of(target: object) -> FencedTable | None:
    """Return the fenced table whose rows this table completes (joined inheritance), or None."""
    table = underlying(target)
    name, found = getattr(table, "info", {}).get(_SUB_TABLE_OF, (None, None))
    return None if name is None or name != table.name else found


def underlying(target: object) -> Any:
    while isinstance(target, AliasedReturnsRows):
        target = target.element
    return target if isinstance(target, FromClause) else None


def check_write_column(table: sa.Table, owner: str) -> None:
    if WRITE_COLUMN not in table.c:
        raise FenceError(
            f"{owner} is fenced, and its table {table.name!r} has no column {WRITE_COLUMN!r}: add it to the "
            f"Table with write_id_column(), and to the database: op.add_fence in a migration adds both"
        )


def template_of(
    table: sa.Table,
    owner: str,
    attributes: Mapping[str, sa.Column[Any]] | None = None,
    said: str | None = None,
) -> ResourceTemplate:
    """Return the template of a table's resources: `said` (by a model), else that of the fence column."""
    attributes = dict(table.c.items()) if attributes is None else attributes
    template: Any = said if said is not None else table.c[FENCE_COLUMN].info.get(RESOURCE_MARK)
    if template is None:
        raise FenceError(
            f"{owner} is fenced and does not say which lease guards a row: write "
            f'__fence_resource__ = "order:{{id}}" in the model, with columns of its table in braces, or '
            f'fence_column(resource="order:{{id}}") in Core; a word without braces stands for the whole table'
        )
    where = f"{owner}.__fence_resource__"
    if not isinstance(template, str):
        raise TypeError(f"{where} is a str such as 'order:{{id}}', not {type(template).__name__}")
    where += f" = {template!r}"
    try:
        fields = [(name, spec) for _, name, spec, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{where} is no format string: {error}") from error
    if any("{" in (spec or "") for _, spec in fields):
        raise ValueError(f"{where} has braces within braces: name each column by itself")
    names = sorted({name for name, _ in fields})
    if unknown := [name for name in names if name not in attributes]:
        raise ValueError(
            f"{where} names {', '.join(map(repr, unknown))}, but the columns of its fenced table are "
            f"{', '.join(sorted(attributes))}"
        )
    if not names and OBJECT_IN_NAME.search(check_resource(template)):
        raise ValueError(
            f"{where} was filled when the class was made: write it without the f before its quotes, such "
            f"as 'order:{{id}}'"
        )
    if loose := [each for each in names if _has_many_spellings(attributes[each].type)]:
        raise ValueError(
            f"{where} names {loose[0]!r}, whose equal values are written in several ways (1.0 and 1.00; "
            f"'a' and 'A' of an enumeration), so that one row would have two names; use integers, text, "
            f"UUIDs or dates"
        )
    return ResourceTemplate(template, {name: attributes[name] for name in names})


def is_one_of(
    key: Sequence[ColumnElement[Any]], identities: Iterable[tuple[Any, ...]]
) -> ColumnElement[bool]:
    return sa.tuple_(*key).in_(identities) if len(key) > 1 else key[0].in_([value for (value,) in identities])
