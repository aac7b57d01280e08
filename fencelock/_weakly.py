"""A dictionary that keeps nothing alive: it forgets a value when nobody else has it any more.

As `weakref.WeakValueDictionary` does, of which every lock would make and remove several entries, by functions
written in Python. Here looking up, and mostly removing, are those of `dict`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar
from weakref import ref

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Reference(ref[_V]):
    """A weak reference that remembers under which key it stands."""

    __slots__ = ("key",)
    key: Any


class WeakValues(dict[_K, Reference[_V]], Generic[_K, _V]):
    """Values by keys. What is looked up is a reference: call it, for the value may be gone by then."""

    def add(self, key: _K, value: _V) -> None:
        """Note a value, in place of what stood there."""
        self[key] = reference = Reference(value, self._forget)
        reference.key = key

    def has(self, key: _K, value: _V) -> bool:
        """Whether this very value stands there."""
        reference = self.get(key)
        return reference is not None and reference() is value

    def _forget(self, reference: Reference[_V]) -> None:
        if self.get(reference.key) is reference:
            removed = self.pop(reference.key, reference)
            if removed is not reference:  # another thread has put it there at this very moment
                self.setdefault(reference.key, removed)
