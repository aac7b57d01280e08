"""The guard's events: callbacks, and records in the log.

A refused stale or unfenced write is reported once, in its thread and task. The records of the logger
`fencelock.guard` have the facts as attributes (`record.table`, `.resource`, `.token`, `.fence`). A refusal is
a WARNING, a write under no lease is INFO, and a claim is DEBUG.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

from fencelock import _events
from fencelock._checks import check_callback
from fencelock._events import (
    GuardEvent,
    RowClaimed,
    StaleWriteRefused,
    UnfencedWriteRefused,
    WrittenWithoutLease,
    forget,
)
from fencelock.errors import FencelockError, StaleTokenError, UnfencedWriteError

__all__ = ["GuardEvent", "forget", "on_claim", "on_stale", "on_unfenced", "report", "report_claim"]

logger: logging.Logger = logging.getLogger("fencelock.guard")
logger.addHandler(logging.NullHandler())  # else Python prints refusals, which are raised as errors anyway

Callback = Callable[[GuardEvent], object]
_C = TypeVar("_C", bound=Callback)

_BETWEEN: Final = frozenset({"fencelock", "sqlalchemy", "sqlmodel", "contextlib", "asyncio"})
"""Packages whose frames are skipped in the search for the program's own line."""

_places: Final[set[str]] = set()
"""The lines of the program that the log has named."""

_REPORTED: Final = "_fencelock_reported"


class _Only:
    """A listener for events of one class. It is equal to its callback, so that `forget` finds it."""

    def __init__(self, kind: type[GuardEvent], callback: Callback) -> None:
        self._kind = kind
        self._callback = callback

    def __call__(self, event: object) -> None:
        if isinstance(event, self._kind):
            self._callback(event)

    def __eq__(self, other: object) -> bool:
        return other == self._callback

    def __hash__(self) -> int:
        return hash(self._callback)


def on_stale(callback: _C) -> _C:
    """Call a function whenever a stale token, or a stale object, is refused; may be used as a decorator.

    ```python
    @on_stale
    def tell(event: GuardEvent) -> None:
        print(f"{event.table} {event.identity}: {event.token} is older than {event.fence}")
    ```

    A callback must be quick, and must not use the session or connection. If it raises, the error is logged,
    and has no other effect.

    Returns:
        The function itself.
    """
    return _add("on_stale", StaleWriteRefused, callback)


def on_unfenced(callback: _C) -> _C:
    """Call a function whenever a write is refused that no lease guards; may be used as a decorator.

    ```python
    @on_unfenced
    def tell(event: GuardEvent) -> None:
        print(f"{event.table}: {event.error}")
    ```

    Returns:
        The function itself.
    """
    return _add("on_unfenced", UnfencedWriteRefused, callback)


def on_claim(callback: _C) -> _C:
    """Call a function whenever a row has been claimed, or a gate passed; may be used as a decorator.

    ```python
    @on_claim
    def tell(event: GuardEvent) -> None:
        print(f"{event.resource}: claimed with {event.token}")
    ```

    Returns:
        The function itself.
    """
    return _add("on_claim", RowClaimed, callback)


def report(error: FencelockError, *, table: str | None = None, resource: str | None = None) -> None:
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    if isinstance(error, StaleTokenError):
        facts = error.table, error.identity, resource, error.token, error.current, error
        _tell(StaleWriteRefused(*facts), logging.WARNING, str(error))
    elif isinstance(error, UnfencedWriteError):
        _tell(UnfencedWriteRefused(table, resource=resource, error=error), logging.WARNING, str(error))


def report_claim(table: str, identity: tuple[Any, ...], resource: str | None, token: int) -> None:
    if _events.listeners or logger.isEnabledFor(logging.DEBUG):
        event = RowClaimed(table, identity, resource, token)
        _tell(event, logging.DEBUG, f"claimed {table}{identity!r} with token {token}")


def report_without_lease(table: str, resource: str | None) -> None:
    """Report a row that is written under no lease; the log names each line of the program once."""
    if not (_events.listeners or logger.isEnabledFor(logging.INFO)):
        return
    event = WrittenWithoutLease(table, resource=resource)
    if logger.isEnabledFor(logging.INFO) and (place := _place()) not in _places:
        _places.add(place)
        _log(event, logging.INFO, f"{place} writes to {table!r} under no lease")
    _events.tell(event)


def _place() -> str:
    """Return the innermost line of the program that has led to this call."""
    frame = inspect.currentframe()
    worker: Any = sys.modules["greenlet"].getcurrent() if "greenlet" in sys.modules else None
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _BETWEEN:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
        if frame is None and worker is not None and worker.parent is not None:  # the coroutine's greenlet
            worker = worker.parent
            frame = worker.gr_frame
    return "an unknown line"


def _add(name: str, kind: type[GuardEvent], callback: _C) -> _C:
    check_callback(name, "event", callback)
    _events.on_event(_Only(kind, callback))
    return callback


def _tell(event: GuardEvent, level: int, message: str) -> None:
    _log(event, level, message)
    _events.tell(event)


def _log(event: GuardEvent, level: int, message: str) -> None:
    facts = {name: getattr(event, name) for name in ("table", "identity", "resource", "token", "fence")}
    logger.log(level, "%s", message, extra=facts)
