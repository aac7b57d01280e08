"""The floor: the same scripts to the same nodes over bare sockets, with nothing around them.

No protocol, no errors, no reconnecting, no token: the least that a process can do to have a majority of
nodes run ACQUIRE and then RELEASE. What fencelock takes longer than this is its own.

With many resources at once it is the ceiling: all of their commands go to a node in one piece, packed
beforehand. No client gets more out of these scripts and nodes.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis

from fencelock.authority.redlock.wire.codec import SCRIPTS


@dataclass(slots=True)
class _Node:
    sock: socket.socket
    acquire: bytes
    release: bytes
    owed: int = 0
    reader: hiredis.Reader = field(default_factory=hiredis.Reader)


class BareSockets:
    """A lock on resources, to be entered over and over, on nodes that have been initialised.

    Args:
        urls: the nodes.
        namespace: which they were initialised in.
        resources: what to lock, all at the same time, but each by itself.
        awaited: how many nodes are waited for; a majority by default.
    """

    def __init__(
        self, urls: Sequence[str], namespace: str, *resources: str, awaited: int | None = None
    ) -> None:
        self._awaited = awaited or len(urls) // 2 + 1
        self._count = len(resources)
        self._poll = select.poll()
        self._nodes: dict[int, _Node] = {}
        for url in urls:
            node = _open(url, f"{{{namespace}}}", resources)
            self._nodes[node.sock.fileno()] = node
            self._poll.register(node.sock, select.POLLIN)

    def __enter__(self) -> None:
        """Have a majority acquire."""
        for node in self._nodes.values():
            node.sock.sendall(node.acquire)
            node.owed += self._count
        self._await_nodes(b"GRANTED")

    def close(self) -> None:
        """Close the connections."""
        for node in self._nodes.values():
            node.sock.close()

    def __exit__(self, *details: object) -> None:
        """Have a majority release."""
        for node in self._nodes.values():
            node.sock.sendall(node.release)
            node.owed += self._count
        self._await_nodes(b"RELEASED")

    def _await_nodes(self, wanted: bytes) -> None:
        """Read until so many have answered everything; each must have done in the end what is wanted."""
        while sum(not node.owed for node in self._nodes.values()) < self._awaited:
            for descriptor, _ in self._poll.poll():
                node = self._nodes[descriptor]
                node.reader.feed(node.sock.recv(65536))
                while (reply := node.reader.gets()) is not False:
                    node.owed -= 1
                    if node.owed < self._count and reply[0] != wanted:
                        raise RuntimeError(f"a node says {reply!r}, and not {wanted!r}")


def _open(url: str, node_key: str, resources: Sequence[str]) -> _Node:
    with redis.Redis.from_url(url) as client:
        about: Any = client.info("server")
        fingerprint: Any = client.hget(node_key, "cfg")
        acquire, release = (client.script_load(SCRIPTS[name]) for name in ("acquire", "release"))
        address = client.connection_pool.connection_kwargs
    sock = socket.create_connection((address["host"], address["port"]))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce, own = "a nonce that is never changed", (about["run_id"], "")
    ttl_ms, epoch, nothing = 10_000, 0, 0
    acquiring, releasing = b"", b""
    for stripe, resource in enumerate(resources):
        keys = (2, node_key, f"{node_key}:l:{resource}")
        acquiring += _pack(
            "EVALSHA", acquire, *keys, fingerprint, nonce, ttl_ms, epoch, stripe, nothing, *own
        )
        releasing += _pack("EVALSHA", release, *keys, fingerprint, nonce, epoch, stripe, nothing, *own)
    return _Node(sock, acquiring, releasing)


def _pack(*words: str | bytes | int) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub knows one word only
    return packed
