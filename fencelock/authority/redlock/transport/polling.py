"""Waits until something has arrived on one of several sockets, with what there is for it."""

from __future__ import annotations

import select
import sys
import time

from fencelock._owners import blocks_greenlets

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.01


class Patched:
    """What waits where monkey-patching has replaced `select.poll`, for threads one after the other.

    That of gevent belongs to the event loop of the thread in which it was made, and whoever waited with it in
    another thread would change that loop behind its back: so each wait has its own.
    """

    def __init__(self) -> None:
        self._events: dict[int, int] = {}

    def register(self, descriptor: int, events: int) -> None:
        """Wait for a socket from now on."""
        self._events[descriptor] = events

    def unregister(self, descriptor: int) -> None:
        """Wait for a socket no more."""
        del self._events[descriptor]

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return the sockets on which something has arrived, after so many milliseconds at the latest."""
        poll = select.poll()
        for descriptor, events in self._events.items():
            poll.register(descriptor, events)
        return poll.poll(timeout)


class Glancing(Patched):
    """Looks again and again, and lets other greenlets run in between.

    For eventlet, which takes `select.poll` away. Its `select.select` is of no use for several sockets: where
    two have something at once, it wakes its caller up a second time, whatever that waits for by then.
    """

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Do as `Patched.poll`."""
        poll = sys.modules["eventlet.patcher"].original("select").poll()
        for descriptor, events in self._events.items():
            poll.register(descriptor, events)
        deadline = time.monotonic() + timeout / 1000
        pause = 0.0
        while not (ready := poll.poll(0)) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(max(2 * pause, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        return list(ready)


def new_poll() -> select.poll | Patched:
    """Return what waits for sockets, and waits for none yet."""
    if not hasattr(select, "poll"):
        return Glancing()
    return select.poll() if blocks_greenlets(select.poll) else Patched()
