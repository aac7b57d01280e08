"""What both drivers have: the connections to the nodes, what opens them, and the queue that hears them."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fencelock.authority.redlock.protocol.messages import Answer, Said
from fencelock.authority.redlock.transport.connector import Connector, Node, Opened, UnusableError
from fencelock.authority.redlock.waiting import Line
from fencelock.authority.redlock.wire.nodes import NodeConnections


class Links:
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
        self.queue = Line(client, len(nodes), random.random)
        names = [node.name for node in nodes]
        self._nodes = NodeConnections(
            names, self, self.queue, f"{node_key}:w:{client}", jitter=random.random, **options
        )
        self._new_connectors = partial(self._make_connectors, nodes, node_key)
        self._connectors = self._new_connectors()

    def _make_connectors(self, nodes: Sequence[Node], node_key: str) -> list[Connector]:
        return [
            Connector(node, node_key, partial(self._connected, index)) for index, node in enumerate(nodes)
        ]

    def _connected(self, index: int, connector: Connector, opened: Opened | UnusableError) -> None:
        """Have a connection be used that has been opened; called in the connecting thread."""
        raise NotImplementedError

    def connect(self, node: int) -> None:
        """Begin to connect to a node."""
        try:
            self._connectors[node].begin()
        except RuntimeError as error:
            detail = f"no thread to connect with: {error}"
            self._nodes.failed(node, Answer(Said.UNREACHABLE, detail=detail), time.monotonic())

    def is_connecting(self, node: int) -> bool:
        """Tell whether that is going on."""
        return self._connectors[node].is_busy

    def disconnect(self, node: int) -> None:
        """Close the socket of a node's connection."""
        raise NotImplementedError
