"""Which resource guards a row: a template with the names of columns, and one spelling for each value.

"order:1" and "order:01" are two leases. So a value is refused that the database would give back otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from string import Formatter
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Column,
    DateTime,
    Enum,
    Float,
    Integer,
    Numeric,
    String,
    Uuid,
)
from sqlalchemy.types import TypeDecorator, TypeEngine

from fencelock.errors import UnfencedWriteError
from fencelock.lease import OBJECT_IN_NAME, check_resource


@dataclass(frozen=True, slots=True)
class ResourceTemplate:
    """`__fence_resource__`: how the resource's name is made of a row's columns.

    Attributes:
        text: as the model has it, such as `"order:{id}"`.
        columns: the column behind each name in braces.
    """

    text: str
    columns: Mapping[str, Column[Any]]

    def render(self, values: Sequence[Any]) -> str:
        """Return the name of the resource that guards the row with these values, one for each column.

        Raises:
            UnfencedWriteError: if a value is not spelt as the database would give it back.
        """
        spelt = {
            name: spelling(column, value)
            for (name, column), value in zip(self.columns.items(), values, strict=True)
        }
        return self.text.format_map(spelt)

    @property
    def in_key(self) -> bool:
        """Whether the primary key alone tells the resource."""
        return all(column.primary_key for column in self.columns.values())

    @classmethod
    def parse(cls, template: str, attributes: Mapping[str, Column[Any]], owner: str) -> ResourceTemplate:
        """Return the template of the model `owner`, whose attributes lead to these columns.

        Raises:
            TypeError: if it is not a string.
            ValueError: if it is not a format string, or names what is no column of the fenced table.
        """
        if not isinstance(template, str):
            raise TypeError(
                f"{owner}.__fence_resource__ is a str such as 'order:{{id}}', not {type(template).__name__}"
            )
        try:
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(
                f"{owner}.__fence_resource__ = {template!r} is no format string: {error}"
            ) from error
        if unknown := sorted(names - attributes.keys()):
            raise ValueError(
                f"{owner}.__fence_resource__ = {template!r} names {', '.join(map(repr, unknown))}, but the "
                f"columns of its fenced table are {', '.join(sorted(attributes))}"
            )
        if not names:
            check_resource(template)
            if OBJECT_IN_NAME.search(template):
                raise ValueError(
                    f"{owner}.__fence_resource__ = {template!r} was filled when the class was made: write it "
                    f"without the f before its quotes, such as 'order:{{id}}'"
                )
        for name in names:
            if _has_many_spellings(attributes[name].type):
                raise ValueError(
                    f"{owner}.__fence_resource__ = {template!r} names {name!r}, whose equal values "
                    f"are written in several ways (1.0 and 1.00; 'a' and 'A' of an enumeration), so that "
                    f"one row would have two names; use integers, text, UUIDs or dates"
                )
        made = cls(template, {name: attributes[name] for name in sorted(names)})
        made.try_out(owner)
        return made

    def try_out(self, owner: str) -> None:
        """Render the template with a value of each column's type, so that what cannot be is known now.

        Raises:
            ValueError: if it cannot be rendered.
        """
        samples = {name: _sample(column.type) for name, column in self.columns.items()}
        if None in samples.values():  # types of one's own have values that are not known here
            return
        try:
            check_resource(self.text.format_map(samples))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"{owner}.__fence_resource__ = {self.text!r} cannot be rendered, with {samples!r} for "
                f"instance: {error}"
            ) from error


def _sample(kind: TypeEngine[Any]) -> Any:
    """Return some value of a type, or None where none is known."""
    if isinstance(kind, TypeDecorator | Enum):
        return None
    samples: tuple[Any, ...] = (1, "x", UUID(int=1), date(2000, 1, 1), datetime(2000, 1, 1), True)  # noqa: DTZ001
    try:
        loaded_as = str if isinstance(kind, Uuid) and not kind.as_uuid else kind.python_type
    except NotImplementedError:
        return None
    return next((sample for sample in samples if type(sample) is loaded_as), None)


def _has_many_spellings(kind: TypeEngine[Any]) -> bool:
    if isinstance(kind, Enum):  # MariaDB compares members regardless of case, and of spaces at the end
        return len({each.casefold().rstrip() for each in kind.enums}) < len(kind.enums)
    return isinstance(kind, Numeric | Float) or (isinstance(kind, DateTime) and kind.timezone)


def spelling(column: Column[Any], value: Any) -> Any:
    """Return a value as the database gives it back: the name of a row's resource must be one and the same.

    To a database "01", 1.0 and True may all equal the key 1, yet "order:01" is not the lease of "order:1".

    Raises:
        UnfencedWriteError: if it cannot be told from here.
    """
    try:
        return _spelling(column.type, value)
    except (TypeError, ValueError):
        raise UnfencedWriteError(
            f"{value!r} is compared with {column.name} of {column.table.description!r}, which names the "
            f"resource that guards the row; give it as the type that the column has ({column.type!r})"
        ) from None


def _spelling(kind: TypeEngine[Any], value: Any) -> Any:
    if isinstance(kind, TypeDecorator | Enum):
        return _member(kind, value) if isinstance(kind, Enum) else value
    if isinstance(kind, Integer):
        as_text = isinstance(value, str) and value == str(int(value))
        return int(value) if as_text else operator.index(value)
    if isinstance(kind, String):
        return str.__str__(value)
    if isinstance(kind, Uuid):
        return value if isinstance(value, UUID) else str(UUID(value))
    try:
        loaded_as = kind.python_type
    except NotImplementedError:
        return value
    if type(value) is not loaded_as:
        raise TypeError
    return value


def _member(kind: Enum, value: Any) -> Any:
    """Return a member of an enumeration: SQLAlchemy also takes its name, and MariaDB a name in any case."""
    if kind.enum_class is None:
        known = isinstance(value, str) and value in kind.enums
    else:
        known = isinstance(value, kind.enum_class)
    if not known:
        raise TypeError
    return value
