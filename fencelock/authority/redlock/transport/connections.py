"""The common part of both drivers: the connections to the nodes, and the threads that open them.

Opening a connection blocks, so a new thread does it. A node that hangs meanwhile costs the others nothing.
"""

from __future__ import annotations

import abc
import random
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from fencelock import _events, _threads
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.transport.connector import Node, Opened, UnusableError
from fencelock.authority.redlock.wire.connection import Connection
from fencelock.authority.redlock.wire.nodes import NodeConnections


class Connections(abc.ABC):
    """One connection to each node.

    Args:
        nodes: where the nodes are.
        node_key: key of a node's hash; the channel on which the nodes call begins with it.
        options: those of `NodeConnections`.

    Attributes:
        queue: hears the nodes' calls.
    """

    def __init__(self, nodes: Sequence[Node], node_key: str, **options: Any) -> None:
        client = secrets.token_hex(8)
        self.queue: WaitQueue = WaitQueue(client, len(nodes), random.random)
        self._names = names = [node.name for node in nodes]
        channel = f"{node_key}:w:{client}"
        self._nodes = NodeConnections(names, self, self.queue, channel, jitter=random.random, **options)
        self._opens = [node.open for node in nodes]
        self._node_key = node_key
        #: The connecting thread of each node. Connections of threads that are not here are closed.
        self._connecting: dict[int, threading.Thread] = {}

    def connect(self, node: int) -> None:
        if self.is_connecting(node):
            return
        name = f"fencelock-connect-{node}"
        thread = threading.Thread(target=self._open, args=(node,), name=name, daemon=True)
        self._connecting[node] = thread
        try:
            _threads.start(thread)
        except RuntimeError as error:  # too many threads, or the interpreter is on its way out
            detail = f"no thread to connect with: {error}"
            self._nodes.failed(node, Reply(ReplyKind.UNREACHABLE, detail=detail), time.monotonic())

    def is_connecting(self, node: int) -> bool:
        thread = self._connecting.get(node)
        return thread is not None and thread.is_alive()

    def _open(self, node: int) -> None:
        opened: Opened | UnusableError
        event: ConnectionOpened | ConnectionFailed
        try:
            opened = self._opens[node](self._node_key)
            event = ConnectionOpened("Redlock", self._names[node])
        except UnusableError as error:
            opened, event = error, ConnectionFailed("Redlock", self._names[node], str(error.answer))
        if _events.listeners:
            _events.tell(event)
        self._opened(node, opened)

    def _use(self, node: int, opened: Opened | UnusableError) -> tuple[socket.socket, Connection] | None:
        """Use an opened connection, and return it with its socket; None if there is no use for it."""
        now = time.monotonic()
        if isinstance(opened, UnusableError):
            self._nodes.failed(node, opened.answer, now)
            return None
        connection = self._nodes.connected(node, opened.identity, now, pushes=opened.pushes)
        if connection is None:
            opened.sock.close()
            return None
        return opened.sock, connection

    @abc.abstractmethod
    def _opened(self, node: int, opened: Opened | UnusableError) -> None:
        """Take over an opened connection, or its error; the connecting thread calls this."""

    @abc.abstractmethod
    def disconnect(self, node: int) -> None:
        """Close the socket of a node's connection."""
