"""Waits until one of several sockets is ready, by the means of the platform."""

from __future__ import annotations

import select
import sys
import time
from typing import Any

from fencelock._owners import blocks_greenlets

#: The numbers of `poll`; Windows has no names for them.
READ, WRITE = getattr(select, "POLLIN", 1), getattr(select, "POLLOUT", 4)


class Selected:
    """Stands in for `select.poll` on platforms without it, such as Windows: for some hundred sockets."""

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        self._events[descriptor] = events

    def unregister(self, descriptor: int) -> None:
        del self._events[descriptor]

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return the sockets that are ready, after `timeout` milliseconds at the latest."""
        reading, writing = (
            [each for each, events in self._events.items() if events & way] for way in (READ, WRITE)
        )
        if not reading:  # Windows refuses to wait for no sockets
            time.sleep(timeout / 1000)
            return []
        readable, writable, _ = select.select(reading, writing, [], timeout / 1000)
        return [(each, READ) for each in readable] + [(each, WRITE) for each in writable]


class Patched(Selected):
    """Stands in for a `select.poll` that was monkey-patched; threads use it one after the other.

    A poll object of gevent belongs to the event loop of the thread that made it, and a wait in another thread
    would change that loop. So each wait makes its own.
    """

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        # A poll with timeout 0 is called under its caller's mutex, so no other greenlet may run meanwhile.
        gevent: Any = sys.modules["gevent.monkey"]
        poll = select.poll() if timeout else gevent.get_original("select", "poll")()
        for descriptor, events in self._events.items():
            poll.register(descriptor, events)
        return poll.poll(timeout)


def new_poll() -> select.poll | Selected:
    if not hasattr(select, "poll"):
        if "eventlet" in sys.modules:
            raise RuntimeError("eventlet takes select.poll away: use gevent, threads or asyncio")
        return Selected()
    return select.poll() if blocks_greenlets(select.poll) else Patched()
