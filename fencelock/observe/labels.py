"""Names of locks for metrics and spans: by default not the resources, because these are too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fencelock._events import LockEvent

#: The most different names. A program that locks random names would make a time series for each name.
_MOST_NAMES: Final = 200
OTHER: Final = "other"

LabelFunction = Callable[[LockEvent], str]  # returns the name of a lock in metrics and spans


def kind_of_lock(event: LockEvent) -> str:
    """Return the template that `@fenced` was given, or else the part of the name before the first `:`.

    A lock whose name has no `:` is "other", because this name may be a person's. A slot counts as its
    semaphore.
    """
    name, slot, _ = event.resources[0].rpartition("#")
    constant, colon, _ = (name or event.resources[0]).partition(":")
    return event.template or (constant if colon or slot else OTHER)


class Labels:
    """Gives names to locks: "other" for each new name after the first 200. Templates do not count."""

    def __init__(self, function: LabelFunction = kind_of_lock) -> None:
        self._function = function
        self._known: set[str] = set()

    def of(self, event: LockEvent) -> str:
        name = self._function(event)
        if name not in self._known and name not in {OTHER, event.template}:
            if len(self._known) >= _MOST_NAMES:
                return OTHER
            self._known.add(name)
        return name


def authority_of(event: LockEvent) -> str:
    return type(event.authority).__name__
