"""What the guard does: callbacks to hang metrics on, and records in the log.

A refusal is told once, in its own thread and task, before the transaction is rolled back. The log records of
`fencelock.guard` have the facts as attributes (`record.table`, `.resource`, `.token`, `.fence`): a warning
for what was refused, and for claims a record on the level DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fencelock.errors import FenceError, LockLostError, StaleTokenError, UnfencedWriteError

logger = logging.getLogger("fencelock.guard")
logger.addHandler(logging.NullHandler())  # what is refused is an error as well: nobody has to read it twice


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """Something that the guard did.

    Attributes:
        table: name of the table; None where it cannot be told.
        identity: primary key of the row, as a tuple; None where there is no one row.
        resource: of the lease; None where it is not known, or there is none.
        token: the fencing token that was written or refused; None where there is none.
        fence: of the row, where that was higher than the token.
        error: what is raised; None for a claim.
    """

    table: str | None
    identity: tuple[Any, ...] | None = None
    resource: str | None = None
    token: int | None = None
    fence: int | None = None
    error: FenceError | None = None


Callback = Callable[[GuardEvent], object]
_C = TypeVar("_C", bound=Callback)

_callbacks: Final[dict[str, tuple[Callback, ...]]] = {"stale": (), "unfenced": (), "claim": ()}
_REPORTED: Final = "_fencelock_reported"


def on_stale(callback: _C) -> _C:
    """Call a function whenever the database has turned a stale token away; may be used as a decorator.

    Callbacks are to be quick, and must not use the session or connection; one that fails is logged, and
    changes nothing.
    """
    return _add("stale", callback)


def on_unfenced(callback: _C) -> _C:
    """Call a function whenever a write without its lease was refused; may be used as a decorator."""
    return _add("unfenced", callback)


def on_claim(callback: _C) -> _C:
    """Call a function whenever a row has been claimed, or a gate passed; may be used as a decorator."""
    return _add("claim", callback)


def forget(callback: Callback) -> None:
    """Call a function no more."""
    for kind, callbacks in _callbacks.items():
        _callbacks[kind] = tuple(each for each in callbacks if each != callback)


def report(
    error: FenceError | LockLostError, *, table: str | None = None, resource: str | None = None
) -> None:
    """Tell of a refusal, once."""
    if getattr(error, _REPORTED, False):
        return
    setattr(error, _REPORTED, True)
    if isinstance(error, StaleTokenError):
        event = GuardEvent(error.table, error.identity, resource, error.token, error.current, error)
        _tell("stale", event, logging.WARNING, str(error))
    elif isinstance(error, UnfencedWriteError):
        _tell("unfenced", GuardEvent(table, resource=resource, error=error), logging.WARNING, str(error))


def report_claim(table: str, identity: tuple[Any, ...], resource: str | None, token: int) -> None:
    """Tell of a claim."""
    if _callbacks["claim"] or logger.isEnabledFor(logging.DEBUG):
        event = GuardEvent(table, identity, resource, token)
        _tell("claim", event, logging.DEBUG, f"claimed {table}{identity!r} with token {token}")


def _add(kind: str, callback: _C) -> _C:
    if not callable(callback):
        raise TypeError(f"on_{kind} calls a function with the event, and {callback!r} is none")
    _callbacks[kind] = (*_callbacks[kind], callback)
    return callback


def _tell(kind: str, event: GuardEvent, level: int, message: str) -> None:
    facts = {name: getattr(event, name) for name in ("table", "identity", "resource", "token", "fence")}
    logger.log(level, "%s", message, extra=facts)
    for callback in _callbacks[kind]:
        try:
            callback(event)
        except Exception:
            logger.exception("a callback of on_%s failed", kind)
