"""The guard's events, and its records in the log.

A refused stale or unfenced write is reported once, in its thread and task. The records of the logger
`fencelock.guard` have the facts as attributes (`record.table`, `.resource`, `.token`, `.fence`). A refusal is
a WARNING, a write under no lease is INFO, and a claim is DEBUG.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any, Final

from fencelock import _events
from fencelock._events import (
    GuardEvent,
    RowClaimed,
    StaleWriteRefused,
    UnfencedWriteRefused,
    WrittenWithoutLease,
)
from fencelock.errors import FencelockError, StaleTokenError, UnfencedWriteError

logger: logging.Logger = logging.getLogger("fencelock.guard")
logger.addHandler(logging.NullHandler())  # else Python prints refusals, which are raised as errors anyway

_BETWEEN: Final = frozenset({"fencelock", "sqlalchemy", "sqlmodel", "contextlib", "asyncio"})
"""Packages whose frames are skipped in the search for the program's own line."""

_places: Final[set[str]] = set()  # the lines of the program that the log has named

_REPORTED: Final = "_fencelock_reported"


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


def _tell(event: GuardEvent, level: int, message: str) -> None:
    _log(event, level, message)
    _events.tell(event)


def _log(event: GuardEvent, level: int, message: str) -> None:
    facts = {name: getattr(event, name) for name in ("table", "identity", "resource", "token", "fence")}
    logger.log(level, "%s", message, extra=facts)
