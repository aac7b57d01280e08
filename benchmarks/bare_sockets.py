"""The floor: the same scripts to the same nodes over bare sockets, with nothing around them.

No protocol, no errors, no reconnecting, no token: the least that a process can do to have a majority of
nodes run ACQUIRE and then RELEASE. What fencelock takes longer than this is its own.

With many resources at once it is the ceiling: all of their commands go to a node merged into one, as those
of the tasks of a loop do, and packed beforehand. Nobody gets more out of these scripts and nodes, which have
hardly to wait for anybody.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
import redis

from fencelock.authority.redlock.node import SCRIPTS


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
        self._words = (b"GRANTED", b"RELEASED") if len(resources) == 1 else (b"MERGED", b"MERGED")
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
            node.owed += 1
        self._await_nodes(self._words[0])

    def close(self) -> None:
        """Close the connections."""
        for node in self._nodes.values():
            node.sock.close()

    def __exit__(self, *details: object) -> None:
        """Have a majority release."""
        for node in self._nodes.values():
            node.sock.sendall(node.release)
            node.owed += 1
        self._await_nodes(self._words[1])

    def _await_nodes(self, wanted: bytes) -> None:
        """Read until so many have answered everything; each must have done last what is wanted."""
        while sum(not node.owed for node in self._nodes.values()) < self._awaited:
            for descriptor, _ in self._poll.poll():
                node = self._nodes[descriptor]
                node.reader.feed(node.sock.recv(65536))
                while (reply := node.reader.gets()) is not False:
                    node.owed -= 1
                    if not node.owed and (reply[0] != wanted or (wanted == b"MERGED" and 0 in reply[2:])):
                        raise RuntimeError(f"a node says {reply!r}, and not {wanted!r}")


def _open(url: str, node_key: str, resources: Sequence[str]) -> _Node:
    with redis.Redis.from_url(url) as client:
        about: Any = client.info("server")
        fingerprint: Any = client.hget(node_key, "cfg")
        acquire, release, merged = (
            client.script_load(SCRIPTS[name]) for name in ("acquire", "release", "merged")
        )
        address = client.connection_pool.connection_kwargs
    sock = socket.create_connection((address["host"], address["port"]))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce, own = "a nonce that is never changed", (about["run_id"], "")
    ttl_ms, epoch, nothing = 10_000, 0, 0
    locks = [f"{node_key}:l:{resource}" for resource in resources]
    keys = (1 + len(locks), node_key, *locks)
    if len(locks) == 1:
        stripe = 0
        acquiring = (acquire, *keys, fingerprint, nonce, ttl_ms, epoch, stripe, nothing, *own)
        releasing = (release, *keys, fingerprint, nonce, epoch, stripe, nothing, *own)
    else:
        acquires = [word for stripe in range(len(locks)) for word in (nonce, ttl_ms, stripe)]
        releases = [word for stripe in range(len(locks)) for word in (nonce, -nothing, stripe)]
        acquiring = (merged, *keys, fingerprint, "", *acquires, *own)
        releasing = (merged, *keys, fingerprint, "", *releases, *own)
    return _Node(sock, _pack("EVALSHA", *acquiring), _pack("EVALSHA", *releasing))


def _pack(*words: str | bytes | int) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub knows one word only
    return packed
