"""Listeners of the guard's tests: they hear of nothing outside their block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase


@contextmanager
def listening(model: type[DeclarativeBase], name: str, listener: Callable[..., None]) -> Iterator[None]:
    """Have a listener called for an event of a model's flushes, inside the block."""
    event.listen(model, name, listener)
    try:
        yield
    finally:
        event.remove(model, name, listener)
