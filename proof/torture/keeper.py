"""Leases that are kept for as long as a worker lives, and a waiter for each of them.

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

from fencelock._generators import Call, Steps
from fencelock._locking import fenced_lock
from fencelock.authority.base import Authority
from fencelock.errors import FencelockError
from fencelock.lease import Lease
from fencelock.lock.lock import FencedLock
from proof.torture.history import HELD_UP
from proof.torture.journal import Notes
from proof.torture.steps import sleep

#: Seconds between two looks at a lease, and after an attempt that failed.
_LOOK: Final = 0.02
_BACK_OFF: Final = 0.2
#: Seconds for which a waiter waits for a lease that is held all the time.
_LONG: Final = 30.0


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps the lease of worker `kept` where that is its own, or waits for it."""

    kept: int
    ttl: float
    authority: Authority
    notes: Notes
    over: Callable[[], bool]

    def work(self) -> Steps[None]:
        while not self.over():
            lock, began = self._lock(), time.monotonic_ns()
            try:
                lease = yield Call(lock.acquire, lock.aio.acquire)
            except FencelockError as error:
                self.notes.failed([f"kept {self.kept}"], began, error)
                yield sleep(_BACK_OFF)
                continue
            self.notes.acquired([lease], began, kept=self._is_kept)
            watch = _Watch(lease, self.ttl)
            while self._is_kept and not self.over() and watch.goes_on():
                yield sleep(_LOOK)
            tokens, worked_until = {lease.resource: lease.token}, time.monotonic_ns()
            try:
                yield Call(lock.release, lock.aio.release)
            except FencelockError as error:
                why = HELD_UP if watch.held_up else type(error).__name__
                self.notes.released(tokens, worked_until, why)
            else:
                self.notes.released(tokens, worked_until)
            yield sleep(_LOOK)

    def _lock(self) -> FencedLock[Any]:
        """Return the lock. A worker that waits for another's lock gives up before the run is said to hang."""
        timeout = min(_LONG, 10 * self.ttl)
        return fenced_lock(
            f"kept {self.kept}", ttl=self.ttl, timeout=timeout, max_hold=None, authority=self.authority
        )

    @property
    def _is_kept(self) -> bool:
        return self.kept == self.notes.worker


class _Watch:
    """Looks at a lease again and again, and knows whether its process was held up lately."""

    def __init__(self, lease: Lease, ttl: float) -> None:
        self._lease = lease
        self._ttl = ttl
        self._last = time.monotonic()
        self._held_up_at = -math.inf

    def goes_on(self) -> bool:
        now = time.monotonic()
        if now - self._last > self._ttl / 8:
            self._held_up_at = now
        self._last = now
        return not self._lease.lost

    @property
    def held_up(self) -> bool:
        """Whether the process had no time within the last two ttls: it may have extended too late."""
        return self._last - self._held_up_at < 2 * self._ttl
