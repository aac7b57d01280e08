"""Whether a statement goes around the guard: that is said of it, of its engine, or for a block.

Apart from `session` because everybody asks here. A block hangs on a connection as an execution option, so
that all who are given options see it. It knows itself whether it is over, and whose it is: what is left of it
anywhere means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, ref

from sqlalchemy.engine import Connection

from fencelock._owners import current_owner

BYPASS: Final = "bypass"
"""The value of the execution option `fencelock` that lets a statement pass unguarded."""

HOW: Final = (
    'a bypass is said of a statement (execution_options={"fencelock": "bypass"}), of an engine, or for a '
    "block: with fencelock.bypass(session)"
)
"""What to say to one who says it of a session's connection, where it would last."""


class Entry:
    """What one thread or task has begun by entering a block.

    Attributes:
        is_open: whether the block goes on.
        connections: those on which it goes around the guard.
    """

    __slots__ = ("_owner", "connections", "is_open")

    def __init__(self) -> None:
        self.is_open = True
        self.connections: list[ReferenceType[Connection]] = []
        self._owner = current_owner()

    def begin(self, connection: Connection) -> None:
        """Have a connection go around the guard, for who has entered the block."""
        self.connections.append(ref(connection))
        set_choice(connection, _InBlock(self, connection.get_execution_options().get("fencelock")))

    def end(self) -> None:
        """Have everything be as before."""
        self.is_open = False
        for reference in self.connections:
            connection = reference()
            choice = None if connection is None else connection.get_execution_options().get("fencelock")
            if connection is not None and isinstance(choice, _InBlock) and choice.entry is self:
                set_choice(connection, choice.before)

    @property
    def holds_here(self) -> bool:
        """Whether the block goes on, and who asks is in it."""
        return self.is_open and self._owner == current_owner()


class _InBlock(NamedTuple):
    """The option's value in a block.

    Attributes:
        entry: of the block.
        before: the value around it.
    """

    entry: Entry
    before: object


def is_bypassed(options: Mapping[str, Any]) -> bool:
    """Tell whether a statement with these execution options goes around the guard.

    Raises:
        ValueError: if the option has a value that it does not know.
    """
    return "fencelock" in options and _chosen(options["fencelock"])


def _chosen(choice: object) -> bool:
    if isinstance(choice, _InBlock):
        return choice.entry.holds_here or _chosen(choice.before)
    if choice not in (None, BYPASS):
        raise ValueError(f"the execution option fencelock is {BYPASS!r} or left away, not {choice!r}")
    return choice is not None


def lasts(connection: Connection) -> bool:
    """Tell whether a connection itself says that all of its statements go around the guard."""
    own, of_engine = connection.get_execution_options(), connection.engine.get_execution_options()
    return own.get("fencelock") == BYPASS and of_engine.get("fencelock") != BYPASS


def set_choice(connection: Connection, choice: object) -> None:
    """Have a connection say something else from now on."""
    options = connection.get_execution_options().union({"fencelock": choice})
    connection._execution_options = options  # noqa: SLF001  the public way is closed for those of sessions
