"""Releases that are to be made later, by a thread, because an event loop could end before that."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from fencelock._workers import Worker
from fencelock.authority.base import named
from fencelock.errors import FencelockError, QuorumError

logger: logging.Logger = logging.getLogger("fencelock.authority")

_PAUSE: Final = 0.3  # seconds until a release is sent again
_IDLE: Final = 30.0  # seconds for which an idle thread stays


class Due(NamedTuple):
    """A release to send at the time `at`, and to repeat until `until`, on the clock of `time.monotonic`."""

    resources: tuple[str, ...]
    at: float
    until: float
    #: The acquisition may still be on its way, so a release that finds nothing may be too early.
    in_doubt: bool


class DueReleases(dict[str, Due]):
    """Planned releases by nonce; `release` sends one, and returns whether it has found the lease."""

    def __init__(self, release: Callable[[str, Due], object]) -> None:
        super().__init__()
        self._release = release
        self._worker = Worker("fencelock-due", self._send, _IDLE)

    def plan(self, nonce: str, due: Due) -> None:
        self[nonce] = due
        if due.at < self._worker.wakes_at:
            with suppress(RuntimeError):  # no thread can be started now: the next call of `plan` tries again
                self._worker.wake()

    @property
    def is_at_work(self) -> bool:
        """Whether the caller is the thread that sends the releases."""
        return self._worker.is_caller

    def _send(self) -> float:
        """Send the releases that are due; return when the next one is."""
        for nonce, due in list(self.items()):
            # `get` finds another release, or none, if this one was replaced or removed meanwhile.
            if due.at <= time.monotonic() and self.get(nonce) is due and self._has_to_go_on(nonce, due):
                self.setdefault(nonce, due._replace(at=time.monotonic() + _PAUSE))
        return min((due.at for due in list(self.values())), default=math.inf)

    def _has_to_go_on(self, nonce: str, due: Due) -> bool:
        """Send a release; return whether to send it once more."""
        self.pop(nonce, None)
        try:
            found = self._release(nonce, due)
        except QuorumError:
            return time.monotonic() < due.until
        except FencelockError as error:
            logger.warning("%s could not be released: %s", named(due.resources), error)
            return False
        except Exception:
            logger.exception("%s could not be released", named(due.resources))
            return False
        return due.in_doubt and not found and time.monotonic() < due.until
