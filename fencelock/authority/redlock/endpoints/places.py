"""Where a node is, and which server to connect to at the moment.

Most nodes are one server at one address. Of two kinds the server may change while the node stays the same:
behind Sentinel a replica may be promoted, and in a Redis Cluster a slot has its primary, which another may
succeed. For these the question is asked anew for every connection, and nothing is trusted on the way: what
votes must prove, on every vote, that it is the very server that was admitted (`node.py`). To be sent to the
wrong one costs a refusal, never a token.

All keys of a namespace share a hash tag, so in a cluster one primary serves them all. It is found as
any cluster client finds it: a server that does not serve a key names the one that does (MOVED).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

import redis
from redis.connection import HiredisRespSerializer
from redis.exceptions import MovedError, RedisError, ResponseError

PORT: Final = 6379


#: Servers of a cluster that are kept in mind, should the named ones be gone.
_MOST_LEARNED: Final = 16


class Nowhere(Exception):  # noqa: N818 - it is an answer for `node.py`, and never seen by users
    """There is no server to connect to; says why.

    Attributes:
        passing: whether that may get better by itself.
    """

    def __init__(self, detail: str, *, passing: bool) -> None:
        super().__init__(detail)
        self.passing = passing


class _TextPacker(HiredisRespSerializer):
    """Packs what redis-py sends by itself, as `SELECT 0`; hiredis gets no numbers (see `_pack_words`)."""

    def pack(self, *args: Any) -> Any:
        words: Any = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        return super().pack(*words)


@dataclass(frozen=True, slots=True)
class Server:
    """One address, and how to connect to it.

    Attributes:
        connection_class: the class of blocking connections.
        settings: what they are made with.
    """

    connection_class: Any
    settings: Mapping[str, Any]

    def new_connection(self, protocol: int = 3) -> Any:
        """Return a connection that has not been opened."""
        return self.connection_class(
            **{"command_packer": _TextPacker(), **self.settings, "protocol": protocol}
        )

    def at(self, host: str, port: int) -> Server:
        """Return another address with the same settings."""
        return replace(self, settings={**self.settings, "host": host, "port": port})

    @property
    def is_local(self) -> bool:
        """Whether it is a Unix socket."""
        return "path" in self.settings

    @property
    def scheme(self) -> str:
        """Return `redis`, or `rediss` with TLS."""
        return "rediss" if issubclass(self.connection_class, redis.SSLConnection) else "redis"

    @property
    def login(self) -> str:
        """What stands before the host where there is a password, for whoever types it."""
        return f"{self.settings.get('username') or ''}:PASSWORD@" if self.settings.get("password") else ""

    @property
    def address(self) -> str:
        """Return `host:port`, or the path of a socket."""
        if self.is_local:
            return str(self.settings["path"])
        host = str(self.settings.get("host", "localhost"))
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def port(self) -> int:
        """The port, where there is one."""
        return int(self.settings.get("port", PORT))

    @property
    def database(self) -> str:
        """Return `/number`, and nothing for the first."""
        return f"/{self.settings['db']}" if self.settings.get("db") else ""


class Place(abc.ABC):
    """Where a node is.

    Attributes:
        moves: whether another server may take over while connections live: then every vote has to prove its
            server.
    """

    moves = True

    def __str__(self) -> str:
        return self.url()

    @abc.abstractmethod
    def url(self, login: str = "") -> str:
        """Return the address as a URL, with this in the place of user and password."""

    @property
    @abc.abstractmethod
    def login(self) -> str:
        """What stands in a URL where there is a password, for whoever types it."""

    @abc.abstractmethod
    def servers(self) -> Iterator[Server]:
        """Yield the servers to try, the likeliest first.

        Raises:
            Nowhere: there is none at the moment.
        """

    def elsewhere(self, server: Server, host: str, port: int) -> Server:
        """Return where a server of a cluster has sent us.

        Raises:
            Nowhere: if that is no address that can be connected to.
        """
        if server.is_local:
            raise Nowhere(
                "it is a server of a cluster, in which another one has the keys: name the node by its hosts, "
                "redis+cluster://host1:6379,host2:6379",
                passing=False,
            )
        return server.at(*_endpoint(host, port, server))

    def settle(self, server: Server, others: Sequence[tuple[str, int]]) -> None:  # noqa: B027 - not for all
        """Note which server it was in the end, and which others are in its cluster."""


class Servers(Place):
    """One server that is named; or several of one cluster, any of which knows where the keys are.

    Args:
        named: the servers, in the order in which they are tried.
        is_cluster: whether they were named as servers of a cluster. One that was not may be in one.
        remap: turns addresses that the cluster tells into those to connect to.
    """

    def __init__(
        self,
        named: Sequence[Server],
        *,
        is_cluster: bool,
        remap: Callable[[tuple[str, int]], tuple[str, int]] | None = None,
    ) -> None:
        self.moves = is_cluster
        self._named = tuple(named)
        self._remap = remap
        self._settled: Server | None = None
        self._learned: tuple[Server, ...] = ()

    def url(self, login: str = "") -> str:
        """Return `redis://…`, or `redis+cluster://…`, with the hosts in a fixed order."""
        first = self._named[0]
        if self.moves:
            hosts = ",".join(sorted(server.address for server in self._named))
            return f"{first.scheme}+cluster://{login}{hosts}"
        scheme = "unix" if first.is_local else first.scheme
        return f"{scheme}://{login}{first.address}{'' if first.is_local else first.database}"

    @property
    def login(self) -> str:
        """As for the first server."""
        return self._named[0].login

    def servers(self) -> Iterator[Server]:
        """Yield the one that it was last, those that were named, and what the cluster has told of others."""
        tried = set()
        for server in (self._settled, *self._named, *self._learned):
            if server is not None and server.address not in tried:
                tried.add(server.address)
                yield server

    def elsewhere(self, server: Server, host: str, port: int) -> Server:
        """Return where a server has sent us, by the address that is good from here."""
        there = super().elsewhere(server, host, port)
        return there if self._remap is None else there.at(*self._remap((there.settings["host"], there.port)))

    def settle(self, server: Server, others: Sequence[tuple[str, int]]) -> None:
        """Note the primary, and the servers to ask when it is gone."""
        if server.is_local or not others:
            return
        remap = self._remap or (lambda address: address)
        self._settled = server
        self._learned = tuple(server.at(*remap(other)) for other in others[:_MOST_LEARNED])


class Sentinels(Place):
    """The primary of a service that Sentinel watches.

    Args:
        sentinels: whom to ask where it is.
        service: the name that they know it by.
        data: how to connect to the primary, wherever it is.
        fixed_host: host to connect to whatever they say.
    """

    def __init__(
        self, sentinels: Sequence[Server], service: str, data: Server, fixed_host: str | None = None
    ) -> None:
        #: In the order in which they are asked: those that did not answer last.
        self._sentinels = tuple(sentinels)
        self._service = service
        self._data = data
        self._fixed_host = fixed_host

    def url(self, login: str = "") -> str:
        """Return `redis+sentinel://…`, with the hosts in a fixed order."""
        hosts = ",".join(sorted(sentinel.address for sentinel in self._sentinels))
        service = quote(self._service, safe="")
        return f"{self._data.scheme}+sentinel://{login}{hosts}/{service}{self._data.database}"

    @property
    def login(self) -> str:
        """As for the primary."""
        return self._data.login

    def servers(self) -> Iterator[Server]:
        """Yield the primary, as the sentinels name it at this moment."""
        host, port = self._ask()
        yield self._data.at(self._fixed_host or host, port)

    def _ask(self) -> tuple[str, int]:
        """Return the primary's address, by the newest word among a majority of the sentinels.

        Fewer may be cut off together with a primary that has been replaced and does not know. Through them, a
        recoverer would bring that one to the epoch in which its successor votes: one node, and two votes.
        """
        sentinels = self._sentinels
        needed = len(sentinels) // 2 + 1
        told: list[tuple[int, tuple[str, int]]] = []
        failures: list[str] = []
        for sentinel in sentinels:
            try:
                told.append(_ask_sentinel(sentinel, self._service))
            except LookupError as error:
                raise Nowhere(str(error.args[0]), passing=False) from None
            except (RedisError, OSError) as error:
                failures.append(f"{sentinel.address}: {error}")
                self._sentinels = (*(each for each in self._sentinels if each is not sentinel), sentinel)
            if len(told) == needed:
                return max(told)[1]
        raise Nowhere(
            f"{len(told)} of its {len(sentinels)} sentinels answer, and a majority is {needed}: "
            f"{'; '.join(failures)}",
            passing=True,
        )


def _ask_sentinel(sentinel: Server, service: str) -> tuple[int, tuple[str, int]]:
    """Return what a sentinel says: the number of the failover that led to it, and the primary's address.

    Raises:
        LookupError: it does not know the service.
        RedisError, OSError: it cannot be reached, or is no sentinel.
    """
    connection = sentinel.new_connection(protocol=2)
    try:
        connection.connect()
        connection.send_command("SENTINEL", "MASTER", service)
        try:
            facts = _pairs(connection.read_response())
        except ResponseError as error:
            if "no such master" not in str(error).lower():
                raise
            connection.send_command("SENTINEL", "MASTERS")
            known = ", ".join(sorted(_pairs(each)["name"] for each in connection.read_response())) or "none"
            raise LookupError(
                f"the sentinel {sentinel.address} knows no service {service!r}; those that it knows: {known}"
            ) from None
        return int(facts.get("config-epoch", 0)), (facts["ip"], int(facts["port"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ResponseError(f"it does not answer like a sentinel: {error!r}") from error
    finally:
        connection.disconnect()


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    """Return the fields that a sentinel tells one after the other."""
    words = [word.decode() for word in flat]
    return dict(zip(words[::2], words[1::2], strict=True))


def redirection(error: Exception) -> tuple[str, int] | None:
    """Return the address that an error reply names, if it says where the keys are: MOVED slot host:port."""
    # redis-py takes the first word away where it has a class for the error: older ones for clusters only.
    words = str(error).split()
    if not isinstance(error, MovedError) and words[:1] != ["MOVED"]:
        return None
    host, _, port = words[-1].rpartition(":")
    return host, int(port)


def members_of_cluster(server: Server, slots: Any) -> list[tuple[str, int]]:
    """Return the addresses in an answer to CLUSTER SLOTS."""
    found: dict[tuple[str, int], None] = {}
    for _, _, *members in slots:
        for host, port, *_ in members:
            found[_endpoint((host or b"").decode(), port, server)] = None
    return list(found)


def _endpoint(host: str, port: int, server: Server) -> tuple[str, int]:
    """Return an address that a server has told: without a host, it is its own."""
    return (host if host not in {"", "?"} else str(server.settings.get("host", "localhost"))), port
