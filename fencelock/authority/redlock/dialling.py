"""Opens the connection to a node in the background, once at a time, and not again too soon after a failure.

redis-py's connecting blocks, so it is done in a thread of its own, that ends with it: a node that hangs
while being connected to costs nobody anything. What commands go over and what calls arrive on are both
opened this way; whoever opens one takes it into use in a thread and at a moment of its own choice.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from fencelock import _threads
from fencelock.authority.redlock.node import Link, Node, Unusable
from fencelock.authority.redlock.protocol import Answer, Said

_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0
#: Doublings after which the pause is the longest in any case; a number has room for some thousand only.
_MOST_DOUBLINGS = 10


class Dialler:
    """The way to a link to one node.

    Args:
        node: where the node is.
        mutex: held for what the connecting thread shares with others; re-entrant.

    Attributes:
        arrived: a link that has been opened in the background and is not in use yet.
        failure: why there is no link, as the answer to report.
        retry_at: when it may be tried again.
    """

    #: What the connecting thread is for, as its name says.
    purpose = "connect"

    def __init__(self, node: Node, mutex: threading.RLock) -> None:
        self.node = node
        self.arrived: Link | None = None
        self.failure = Answer(Said.UNREACHABLE, detail="not connected yet")
        self.retry_at = 0.0
        self._mutex = mutex
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def dialling(self) -> bool:
        """Whether a thread is at work on a new link."""
        return self._thread is not None and self._thread.is_alive()

    def dial(self, node_key: str, meet: Callable[[Link], None], announce: Callable[[], None]) -> None:
        """Begin to open a link, unless that is going on, is done, has just failed, or is too late.

        Args:
            node_key: key of a node's hash, which is read while connecting.
            meet: told of the link before it has arrived, in the connecting thread.
            announce: called when the link has arrived or has failed, in the connecting thread.
        """
        if self.dialling or self.arrived is not None or time.monotonic() < self.retry_at or self._closed:
            return
        self._thread = threading.Thread(
            target=self._open,
            args=(node_key, meet, announce),
            name=f"fencelock-{self.purpose}-{self.node.name}",
            daemon=True,
        )
        try:
            _threads.start(self._thread)
        except RuntimeError as error:  # too many threads, or the interpreter is on its way out
            self.fail(Answer(Said.UNREACHABLE, detail=f"no thread to connect with: {error}"))

    def _open(self, node_key: str, meet: Callable[[Link], None], announce: Callable[[], None]) -> None:
        try:
            link = self.node.open(node_key)
        except Unusable as error:
            with self._mutex:
                self._thread = None
                self.fail(error.answer)
        else:
            meet(link)
            with self._mutex:
                self._thread = None
                self._failures = 0
                if self._closed:
                    link.close()
                else:
                    self.arrived = link
        announce()

    def fail(self, answer: Answer) -> None:
        """Note why there is no link, and put off the next try: longer from time to time."""
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        self.failure = answer
        pause = self._pause(answer) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients, hides nothing
        self.retry_at = time.monotonic() + pause

    def _pause(self, answer: Answer) -> float:  # noqa: ARG002 - who only listens has longer ones
        """Return the longest pause in seconds until the next try."""
        return min(LONGEST_BACKOFF, _BACKOFF * 2.0**self._failures)

    def take(self) -> Link | None:
        """Return the link that has arrived, if any; from now on it is the caller's to close."""
        with self._mutex:
            link, self.arrived = self.arrived, None
            return link

    def close(self) -> None:
        """Close what has arrived and what is still to; nothing is opened any more."""
        with self._mutex:
            self._closed = True
            if (link := self.take()) is not None:
                link.close()

    def leave_to_parent(self) -> None:
        """In a forked child: close its copy of the socket, by no lock that a thread may have held."""
        if self.arrived is not None:
            self.arrived.close()
