"""Clients that measure how long a fault leaves them without service: plain ones, and holders of locks.

A plain client reads a row with FOR UPDATE, changes it and commits, again and again. A holder takes one lock
with a lease of 30 s, the default, again and again, and holds it nearly all the time. So a fault mostly finds
it held, and the lock cannot be had again before it was released, or its lease has ended.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from fencelock import Database, fenced_lock
from fencelock.errors import FencelockError
from proof.torture.table import PlainCounter, engine_on

_TTL: Final = 30.0
_HOLD: Final = 0.1
_PAUSE: Final = 0.02
#: Seconds until a client that met an error tries again.
_AGAIN: Final = 0.1


class Outage(NamedTuple):
    """The longest times without service, in seconds."""

    plain: float
    locks: float

    def __str__(self) -> str:
        return f"without service: plain {self.plain:.1f} s, locks {self.locks:.1f} s"


class Service:
    """A plain client and a holder at each URL, for as long as the `with` block."""

    def __init__(self, urls: Sequence[str], rows: Sequence[str]) -> None:
        self._urls = urls
        self._over = threading.Event()
        self._plain: list[list[float]] = [[] for _ in urls]
        self._locks: list[list[float]] = [[] for _ in urls]
        self._threads = []
        for number, url in enumerate(urls):
            for work, seen in ((self._write, self._plain), (self._lock, self._locks)):
                arguments = (url, f"{rows[number]}", seen[number])
                self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))

    def __enter__(self) -> Self:
        for name in ("fencelock", "sqlalchemy.pool"):  # of outages, as intended
            logging.getLogger(name).setLevel(logging.CRITICAL)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(5.0)

    def is_back(self, since: float) -> bool:
        """Tell whether all clients have been served after this time of `time.monotonic`."""
        return all(seen and seen[-1] > since for seen in (*self._plain, *self._locks))

    def outage(self, since: float, without: Collection[int] = ()) -> Outage:
        """Return the longest outages since then, but for clients of the nodes that were broken themselves."""

        def longest(all_seen: list[list[float]]) -> float:
            return max(_longest(seen, since) for number, seen in enumerate(all_seen) if number not in without)

        return Outage(longest(self._plain), longest(self._locks))

    def _write(self, url: str, row: str, seen: list[float]) -> None:
        engine, its = engine_on(url), PlainCounter.name == row

        def once() -> None:
            with engine.begin() as connection:
                connection.execute(select(PlainCounter.value).where(its).with_for_update())
                connection.execute(update(PlainCounter).where(its).values(value=PlainCounter.value + 1))

        self._repeat(once, seen, DBAPIError)
        engine.dispose()

    def _lock(self, url: str, row: str, seen: list[float]) -> None:
        with Database(url) as authority:

            def once() -> None:
                with fenced_lock(f"service:{row}", ttl=_TTL, timeout=5.0, authority=authority):
                    seen.append(time.monotonic())
                    self._over.wait(_HOLD)

            self._repeat(once, [], FencelockError)

    def _repeat(self, once: Callable[[], None], seen: list[float], error: type[Exception]) -> None:
        while not self._over.is_set():
            try:
                once()
            except error:
                self._over.wait(_AGAIN)
            else:
                seen.append(time.monotonic())
                self._over.wait(_PAUSE)


def _longest(seen: Sequence[float], since: float) -> float:
    seen = [*seen]
    before = [at for at in seen if at <= since][-1:] or [since]
    times = [*before, *(at for at in seen if at > since), time.monotonic()]
    return max(later - earlier for earlier, later in itertools.pairwise(times))
