"""The N nodes' calls: what the blocking and the asyncio listener have in common.

Which nodes are listened to, over one connection each, and what becomes of what they say. A listener adds
how a socket is watched (`_watch`), how it is told of a new link (`_announce`), and how those who wait are
woken. Connections are opened when somebody waits for the first time, and again when they are lost.

A node that cannot be reached, or does not let this user listen, is silent. As long as fewer than a majority
can be heard, nobody stands in line, and waiting means looking again and again. What the calls mean stands in
`waiting.py`.
"""

from __future__ import annotations

import abc
import random
import secrets
import threading
import time
from collections.abc import Sequence

from fencelock.authority.redlock.dialling import Dialler
from fencelock.authority.redlock.node import Link, Node, Unusable
from fencelock.authority.redlock.protocol import Answer, Answers, Said
from fencelock.authority.redlock.waiting import Line

#: Where a user or a password is refused, that will not change soon.
_REFUSED_BACKOFF = 30.0


class Ear(Dialler):
    """One node's connection for its calls, or when to try for another."""

    purpose = "listen"

    def __init__(self, number: int, node: Node, mutex: threading.RLock) -> None:
        super().__init__(node, mutex)
        self.number = number
        self.link: Link | None = None

    def _pause(self, answer: Answer) -> float:
        return _REFUSED_BACKOFF if answer.said is Said.ERROR else super()._pause(answer)


class Listening(abc.ABC):
    """Listens to the nodes for one client of theirs.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash; channels begin with it.

    Attributes:
        hears: whether a majority of the nodes could call.
    """

    def __init__(self, nodes: Sequence[Node], node_key: str) -> None:
        #: Guards the line, and what the connecting threads share with whoever listens.
        self._mutex = threading.RLock()
        self._ears = [Ear(number, node, self._mutex) for number, node in enumerate(nodes)]
        self._node_key = node_key
        client = secrets.token_hex(8)
        self._channel = f"{node_key}:w:{client}"
        self._line = Line(client, len(nodes), random.random)
        self.hears = False

    @abc.abstractmethod
    def _watch(self, ear: Ear, link: Link) -> None:
        """See to it that what arrives on a link is read."""

    @abc.abstractmethod
    def _unwatch(self, ear: Ear, link: Link) -> None:
        """Undo `_watch`, before the link is closed."""

    @abc.abstractmethod
    def _announce(self) -> None:
        """Say that a connection has come up or failed; called in the connecting thread."""

    def leave_to_parent(self) -> None:
        """In a forked child: close its copies of the sockets, by no lock that a thread may have held."""
        for ear in self._ears:
            ear.leave_to_parent()
            if ear.link is not None:
                ear.link.close()

    def expect(self, place: str, nonce: str) -> str:
        """Count the calls for a bid from now on; return its place, a new one where it is empty."""
        with self._mutex:
            place = place or self._line.new_place()
            self._line.expect(place, nonce, time.monotonic())
            return place

    def granted(self, place: str) -> Answers:
        """Return the nodes that have granted the present bid of a place while it waited."""
        with self._mutex:
            return self._line.granted(place)

    def leave(self, place: str) -> None:
        """Forget a place whose acquisition is over."""
        with self._mutex:
            self._line.leave(place)

    def _dial_absent(self, now: float) -> None:
        """Begin to open what is not open, or goes to a server that another has taken over from.

        A call reaches only those who listen to the very server that makes it, also in a cluster. What may
        not be tried again at that moment is the caller's to plan: this may take longer than until it may be.
        """
        for ear in self._ears:
            if ear.link is not None and ear.link.identity.run_id != ear.node.run_id:
                self._drop(ear)
            if ear.link is None and ear.retry_at <= now:
                ear.dial(self._node_key, lambda _: None, self._announce)

    def _adopt(self) -> None:
        """Listen on the links that have been opened in the background."""
        for ear in self._ears:
            if ear.link is None and ear.arrived is not None and (link := ear.take()) is not None:
                ear.link = link
                self._watch(ear, link)
                try:
                    link.subscribe(self._channel)
                except Unusable as error:
                    self._lose(ear, error.answer)

    def _hear(self, ear: Ear) -> set[str]:
        """Read what a node has said; return the places that it was about."""
        called: set[str] = set()
        if ear.link is None:
            return called
        try:
            messages = ear.link.messages()
        except Unusable as error:
            self._lose(ear, error.answer)
            return called
        now = time.monotonic()
        with self._mutex:
            for message in messages:
                if message is None:
                    self._line.listen(ear.number)
                    self.hears = self._line.hears
                elif place := self._line.note(ear.number, message, now):
                    called.add(place)
        return called

    def _lose(self, ear: Ear, answer: Answer) -> None:
        """Close a node's link, and say why there is none."""
        ear.fail(answer)
        self._drop(ear)

    def _drop(self, ear: Ear) -> None:
        with self._mutex:
            self._line.go_deaf(ear.number)
            self.hears = self._line.hears
        if (link := ear.link) is not None:
            ear.link = None
            self._unwatch(ear, link)
            link.close()

    def _hang_up(self) -> None:
        """Close all connections. While nobody reads."""
        for ear in self._ears:
            self._drop(ear)
