"""Waits until something has arrived on one of several sockets, with what there is for it."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from typing import Any

from fencelock._owners import blocks_greenlets


class Patched:
    """What waits where monkey-patching has replaced `select.poll`, for threads one after the other.

    That of gevent belongs to the event loop of the thread in which it was made, and whoever waited with it in
    another thread would change that loop behind its back: so each wait has its own.
    """

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        self._events[descriptor] = events

    def unregister(self, descriptor: int) -> None:
        del self._events[descriptor]

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return the sockets on which something has arrived, after so many milliseconds at the latest."""
        # A look without a timeout is taken with the mutex held, so no other greenlet may run meanwhile.
        make: Callable[[], select.poll] = select.poll if timeout else _original()
        poll = make()
        for descriptor, events in self._events.items():
            poll.register(descriptor, events)
        return poll.poll(timeout)


def _original() -> Any:
    return sys.modules["gevent.monkey"].get_original("select", "poll")


def new_poll() -> select.poll | Patched:
    """Return what waits for sockets, and waits for none yet.

    Raises:
        RuntimeError: there is no `select.poll`.
    """
    if not hasattr(select, "poll"):
        raise RuntimeError("select.poll is missing. eventlet takes it away: use gevent, threads or asyncio")
    return select.poll() if blocks_greenlets(select.poll) else Patched()
