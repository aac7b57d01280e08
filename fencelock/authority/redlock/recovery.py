"""Runs recovery in the background, so that no acquisition waits for it.

A `Redlock` has at most one daemon thread for it, with its own connections, also in asyncio programs. The
thread starts when an answer shows that a node has lost its memory, has restarted or lags behind.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from fencelock._backoff import grown, randomly
from fencelock._generators import run
from fencelock._workers import Worker
from fencelock.authority.redlock.protocol.messages import Broadcast, Request, Steps
from fencelock.authority.redlock.transport.blocking import SharedConnections
from fencelock.errors import AuthorityError, FencelockError

_SHORTEST_PAUSE = 0.5
_LONGEST_PAUSE = 60.0
_FAREWELL = 0.2  # seconds that `close` waits for a thread that is in the middle of an exchange


class Recoverer:
    """Starts a recovery after trouble, unless one is running, or the pause after the last one goes on.

    `connect` opens connections to the nodes; `work` makes the procedure, which returns whether all is done.
    """

    def __init__(self, connect: Callable[[], SharedConnections], work: Callable[[], Steps[bool]]) -> None:
        self._connect = connect
        self._work = work
        self._stop = threading.Event()
        self._worker = Worker("fencelock-recovery", self._turn)
        self._connections: SharedConnections | None = None
        self._failures = 0
        self._not_before = 0.0

    def on_trouble(self) -> None:
        """Start a recovery, because a node is in trouble. The call is cheap, and any thread may make it."""
        if self._has_to_wait or self._worker.is_alive:
            return
        try:
            self._worker.wake()
        except RuntimeError:  # too many threads, or the interpreter ends
            self._pause(succeeded=False)

    @property
    def _has_to_wait(self) -> bool:
        return time.monotonic() < self._not_before or self._stop.is_set()

    def close(self) -> None:
        """End a running recovery at its next wait, and begin no other.

        Programs that end soon recover nodes, too: the first puts a ticket on a node, a later one admits it.
        """
        self._stop.set()
        self._worker.close(_FAREWELL)

    def _turn(self) -> float:
        if self._has_to_wait:  # another caller has started the last recovery at the same time
            return math.inf
        succeeded = False
        try:
            self._connections = self._connect()
            succeeded = run(self._work(), self._do)
        except FencelockError:
            pass  # `close` was called, or the next acquisition raises the error
        finally:
            if self._connections is not None:
                self._connections.close()
                self._connections = None
            self._pause(succeeded=succeeded)
        return math.inf

    def _do(self, request: Request) -> Any:
        if isinstance(request, Broadcast):
            return cast("SharedConnections", self._connections).do(request)
        if self._stop.wait(request.seconds):
            raise AuthorityError("the authority was closed")
        return time.monotonic()

    def _pause(self, *, succeeded: bool) -> None:
        self._failures = 0 if succeeded else self._failures + 1
        pause = grown(_SHORTEST_PAUSE, _LONGEST_PAUSE, self._failures, growth=2.0)
        self._not_before = time.monotonic() + randomly(pause)
