"""Listeners of the guard's tests: they hear of nothing outside their block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., None]) -> Iterator[None]:
    """Have a listener called for an event inside the block."""
    event.listen(target, name, listener)
    try:
        yield
    finally:
        event.remove(target, name, listener)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """Collect the statements that are sent in the block."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def words(sent: list[str]) -> list[str]:
    """Return the first word of each statement."""
    return [statement.split(maxsplit=1)[0] for statement in sent]
