"""Leases that are kept for as long as a worker lives, and somebody who waits for each of them.

Most holders are quick, and notice nothing of a node that forgets. These do nothing but extend their lease,
across everything that happens to the nodes, and leave it to others to admit them. So a lease that is lost
although its holder and a majority are well is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fencelock._steps import Steps
from fencelock.authority.base import Authority
from fencelock.errors import FencelockError
from fencelock.lease import Lease
from fencelock.lock.fenced_lock import fenced_lock
from fencelock.lock.lock import FencedLock
from proof.torture.history import HELD_UP, Acquisition, Failure, Release
from proof.torture.journal import Journal
from proof.torture.steps import Step, sleep

#: Seconds between two looks at a lease, and after an attempt that failed.
_LOOK: Final = 0.02
_BACK_OFF: Final = 0.2
#: Seconds for which somebody waits for a lease that is held all the time.
_LONG: Final = 30.0


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps the lease of worker `kept` where that is its own `number`, or waits for it."""

    number: int
    kept: int
    ttl: float
    authority: Authority
    journal: Journal
    over: Callable[[], bool]

    def work(self) -> Steps[None]:
        """Keep or wait until told to stop."""
        while not self.over():
            lock, began = self._lock(), time.monotonic_ns()
            try:
                lease = yield Step(lock.acquire, lock.aio.acquire)
            except FencelockError as error:
                self._note_failure(began, error)
                yield sleep(_BACK_OFF)
                continue
            self._note_acquisition(lease, began)
            watch = _Watch(lease, self.ttl)
            while self._is_kept and not self.over() and watch.goes_on():
                yield sleep(_LOOK)
            worked_until = time.monotonic_ns()
            try:
                yield Step(lock.release, lock.aio.release)
            except FencelockError as error:
                self._note_release(lease, worked_until, HELD_UP if watch.held_up else type(error).__name__)
            else:
                self._note_release(lease, worked_until)
            yield sleep(_LOOK)

    def _lock(self) -> FencedLock[Any]:
        """Return the lock. Whoever waits for another's gives up before the run is said to hang."""
        timeout = min(_LONG, 10 * self.ttl)
        return fenced_lock(
            f"kept {self.kept}", ttl=self.ttl, timeout=timeout, max_hold=None, authority=self.authority
        )

    @property
    def _is_kept(self) -> bool:
        return self.kept == self.number

    def _note_acquisition(self, lease: Lease, began: int) -> None:
        completed = time.monotonic_ns()
        valid_until = int(lease.expires_at * 1e9)
        self.journal.note(
            Acquisition(
                self.number, lease.resource, began, completed, lease.fencing_token, valid_until, self._is_kept
            )
        )

    def _note_failure(self, began: int, error: FencelockError) -> None:
        ended, name = time.monotonic_ns(), type(error).__name__
        self.journal.note(Failure(self.number, f"kept {self.kept}", began, ended, name, str(error)))

    def _note_release(self, lease: Lease, worked_until: int, error: str = "") -> None:
        ended = time.monotonic_ns()
        self.journal.note(
            Release(self.number, lease.resource, lease.fencing_token, worked_until, ended, error)
        )


class _Watch:
    """Looks at a lease again and again, and knows whether its process was held up lately."""

    def __init__(self, lease: Lease, ttl: float) -> None:
        self._lease = lease
        self._ttl = ttl
        self._last = time.monotonic()
        self._held_up_at = -math.inf

    def goes_on(self) -> bool:
        """Whether the lease is held still."""
        now = time.monotonic()
        if now - self._last > self._ttl / 8:
            self._held_up_at = now
        self._last = now
        return not self._lease.lost

    @property
    def held_up(self) -> bool:
        """Whether the process had no time within the last two ttls: it may have extended too late."""
        return self._last - self._held_up_at < 2 * self._ttl
