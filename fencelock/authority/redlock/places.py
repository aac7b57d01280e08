"""Where a node is: what its URL or client says of that, and which server to connect to at the moment.

Most nodes are one server at one address. Of two kinds the server may change while the node stays the same:
behind Sentinel a replica may be promoted, and in a Redis Cluster a slot has its primary, which another may
succeed. For these the question is asked anew for every connection, and nothing is trusted on the way: what
votes must prove, on every vote, that it is the very server that was admitted (`node.py`). To be sent to the
wrong one costs a refusal, never a token.

All keys of a namespace share a hash tag, so in a cluster one primary serves them all. It is found as
any cluster client finds it: a server that does not serve a key says who does (MOVED).
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.retry import Retry

#: What a node is made of.
Source = str | redis.Redis | redis.RedisCluster

#: Settings of a client's pool that would make a connection do things by itself.
_NOT_OURS = frozenset(
    {
        "connection_pool",
        "decode_responses",
        "encoder_class",
        "event_dispatcher",
        "health_check_interval",
        "himport_registry",
        "legacy_responses",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "orig_host_address",
        "orig_socket_connect_timeout",
        "orig_socket_timeout",
        "parser_class",
        "protocol",
        "retry",
        "retry_on_error",
        "retry_on_timeout",
    }
)
#: A connection to a primary does not ask the sentinels by itself.
_PLAIN: Final[dict[Any, Any]] = {
    redis.sentinel.SentinelManagedConnection: redis.Connection,
    redis.sentinel.SentinelManagedSSLConnection: redis.SSLConnection,
}
_GROUP_URL: Final = re.compile(r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?P<rest>.*)", re.DOTALL)
_SENTINEL_PORT: Final = 26379
_PORT: Final = 6379
#: Servers of a cluster that are kept in mind, should the named ones be gone.
_MOST_LEARNED: Final = 16
_FORMS: Final = (
    "redis://host:6379, rediss://user:password@host:6380, unix:///path/to/socket, "
    "redis+sentinel://host1:26379,host2:26379,host3:26379/SERVICE or redis+cluster://host1:6379,host2:6379 "
    "(or valkey, valkeys)"
)


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
        return int(self.settings.get("port", _PORT))

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
        """Note which server it was in the end, and who else is in its cluster."""


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
        """Note the primary, and who may be asked when it is gone."""
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
    """Return the address that an error reply names, if it says who serves the keys: MOVED slot host:port."""
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


def place_of(source: Source, timeout: float) -> Place:
    """Return where a node is.

    Args:
        source: a URL or a client.
        timeout: seconds for connecting, and for each answer while doing so.

    Raises:
        ValueError: for a URL that cannot be understood.
        TypeError: for what is neither a URL nor a client, or a client that connects in a way of its own.
    """
    if isinstance(source, str):
        source = re.sub(r"^valkey(s?)(?=\+|:)", r"redis\1", source)
        group = _GROUP_URL.fullmatch(source)
        if group is None:
            return Servers([_server_of(source, timeout)], is_cluster=False)
        return (_sentinels_of if group["kind"] == "sentinel" else _cluster_of)(source, group, timeout)
    if isinstance(source, redis.RedisCluster):
        return _place_of_cluster(source, timeout)
    if not isinstance(source, redis.Redis):
        raise TypeError(
            f"a node is a URL ({_FORMS}), or a client of redis-py, redis.Redis or redis.RedisCluster, in "
            f"asyncio code too; not {type(source).__module__}.{type(source).__name__}"
        )
    pool: Any = source.connection_pool
    if isinstance(pool, redis.sentinel.SentinelConnectionPool):
        return _place_of_service(pool, timeout)
    return Servers([_server_of_pool(pool, timeout)], is_cluster=False)


def is_source(value: object) -> bool:
    """Whether this is one node, and no list of them."""
    is_client = type(value).__module__.startswith("redis.")  # also one of asyncio, which is refused then
    return is_client or isinstance(value, (str, redis.Redis, redis.RedisCluster))


def split_urls(text: str) -> list[str]:
    """Return the URLs that stand in a text with commas between; there may be several hosts in one of them."""
    urls = re.split(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)", text)
    return [url for url in (each.strip(", \t\r\n") for each in urls) if url]


def _new_server(connection_class: Any, settings: Mapping[str, Any], timeout: float, shown: str) -> Server:
    server = Server(
        connection_class,
        {
            **{name: value for name, value in settings.items() if name not in _NOT_OURS},
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": timeout,
            "socket_timeout": timeout,
        },
    )
    try:
        server.new_connection()  # opens nothing yet, but knows its settings
    except TypeError as error:
        raise ValueError(f"{shown!r} has a setting that is unknown: {error}") from None
    return server


def _server_of(url: str, timeout: float, whole: str = "") -> Server:
    """Return the server that a URL names; `whole` is what it is a part of."""
    shown = _masked(whole or url)
    try:
        pool = redis.ConnectionPool.from_url(url)
        named = url.startswith("unix://") or urlsplit(url).hostname
    except ValueError as error:
        why = "" if "@" in url else f" ({error})"  # which may quote a part of the password
        raise ValueError(f"{shown!r} is no URL of a Redis node{why}; write {_FORMS}") from None
    if not named:
        raise ValueError(f"{shown!r} names no host; write {_FORMS}")
    return _new_server(pool.connection_class, pool.connection_kwargs, timeout, shown)


def _masked(url: str) -> str:
    """Return what an error may show of a URL that is wrong somewhere: nothing before its last @."""
    head, at, tail = url.rpartition("@")
    tail = tail.partition("?")[0]
    return f"{head.partition(':')[0]}://***@{tail}" if at else tail


def without_password(url: str) -> str:
    """Return a URL that has been understood, with the word PASSWORD wherever one is to be typed."""
    before, mark, query = url.partition("?")
    head, at, tail = before.rpartition("@")
    scheme, _, login = head.partition("://")
    user, colon, _ = login.partition(":")
    shown = f"{scheme}://{user}{colon and ':PASSWORD'}@{tail}" if at else tail
    return shown + mark + re.sub(r"(password=)[^&]*", r"\1PASSWORD", query)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a URL with several hosts is made of."""

    login: str
    hosts: tuple[str, ...]
    path: str
    query: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, url: str, rest: str, default_port: int) -> _Parts:
        before, _, query = rest.partition("?")
        authority, _, path = before.partition("/")
        login, at, hosts = authority.rpartition("@")
        named = tuple(host.strip() for host in hosts.split(","))
        if not all(named):
            raise ValueError(f"{_masked(url)!r} names no host; write {_FORMS}")
        ports = tuple(
            host if re.search(r":\d*$", host) and not host.endswith("]") else f"{host}:{default_port}"
            for host in named
        )
        return cls(login + at, ports, path.rstrip("/"), tuple(parse_qsl(query, keep_blank_values=True)))


def _sentinels_of(url: str, group: re.Match[str], timeout: float) -> Sentinels:
    """Read `redis+sentinel://[user:password@]host[:port][,…]/service[/database][?settings]`.

    User and password are the primary's; `sentinel_username` and `sentinel_password` are the sentinels' own.
    Other settings, and TLS (`rediss+sentinel://`), are for both. So other libraries write it too.
    """
    parts = _Parts.of(url, group["rest"], _SENTINEL_PORT)
    service, _, database = parts.path.partition("/")
    if not service:
        raise ValueError(
            f"{_masked(url)!r} names no service; write redis+sentinel://host1:26379,host2:26379/SERVICE, "
            "with the name after `sentinel monitor` in sentinel.conf"
        )
    if database and not database.isdecimal():
        raise ValueError(f"{_masked(url)!r}: after the service there may be the number of a database only")
    own = {name: value for name, value in parts.query if name in {"sentinel_username", "sentinel_password"}}
    common = [(name, value) for name, value in parts.query if name not in own]
    user, password = (quote(own.get(f"sentinel_{part}", ""), safe="") for part in ("username", "password"))
    sentinel_login = f"{user}:{password}@" if own else ""
    settings = urlencode([(name, value) for name, value in common if name != "db"])
    share = timeout / 2 if len(parts.hosts) > 1 else timeout  # so that one that hangs leaves time for others
    sentinels = [
        _server_of(f"{group['scheme']}://{sentinel_login}{host}?{settings}", share, url)
        for host in parts.hosts
    ]
    primary = f"{group['scheme']}://{parts.login}{parts.hosts[0]}/{database}?{urlencode(common)}"
    return Sentinels(sentinels, unquote(service), _server_of(primary, timeout, url))


def _cluster_of(url: str, group: re.Match[str], timeout: float) -> Servers:
    """Read `redis+cluster://[user:password@]host[:port][,…][?settings]`: any of a cluster's servers."""
    parts = _Parts.of(url, group["rest"], _PORT)
    if parts.path not in {"", "0"} or dict(parts.query).get("db", "0") != "0":
        raise ValueError(f"{_masked(url)!r} names a database, and a cluster has one only: leave it out")
    settings = urlencode(parts.query)
    return Servers(
        [
            _server_of(f"{group['scheme']}://{parts.login}{host}?{settings}", timeout, url)
            for host in parts.hosts
        ],
        is_cluster=True,
    )


def _server_of_pool(pool: Any, timeout: float) -> Server:
    """Return the server that the connections of a client's pool go to."""
    theirs = pool.connection_class
    plain = _PLAIN.get(theirs, theirs)
    if issubclass(plain, redis.sentinel.SentinelManagedConnection):
        raise TypeError(
            f"this client connects in a way of its own ({theirs.__name__}), which cannot be repeated here: "
            "name the node by its URL"
        )
    return _new_server(plain, pool.connection_kwargs, timeout, f"<client with {theirs.__name__}>")


def _place_of_service(pool: Any, timeout: float) -> Sentinels:
    """Return where a client made by `Sentinel.master_for` finds its primary."""
    if not pool.is_master:
        raise TypeError(
            "this client is for replicas, and only primaries grant locks: make it with `master_for`"
        )
    manager = pool.sentinel_manager
    share = timeout / 2 if len(manager.sentinels) > 1 else timeout
    return Sentinels(
        [_server_of_pool(client.connection_pool, share) for client in manager.sentinels],
        pool.service_name,
        _server_of_pool(pool, timeout),
        fixed_host=getattr(manager, "_force_master_ip", None),
    )


def _place_of_cluster(client: redis.RedisCluster, timeout: float) -> Servers:
    """Return where the servers of a cluster are that a client was made with."""
    manager: Any = client.nodes_manager
    pool: Any = client.get_redis_connection(next(iter(manager.nodes_cache.values()))).connection_pool
    settings = {name: value for name, value in pool.connection_kwargs.items() if name != "redis_connect_func"}
    if (on_connect := getattr(client, "user_on_connect_func", None)) is not None:

        def greet(connection: Any) -> None:
            connection.on_connect()
            on_connect(connection)

        settings["redis_connect_func"] = greet
    server = _new_server(pool.connection_class, settings, timeout, "<client of a cluster>")
    named = getattr(client, "startup_nodes", None) or manager.startup_nodes.values()
    return Servers(
        [server.at(node.host, int(node.port)) for node in named],
        is_cluster=True,
        remap=getattr(manager, "address_remap", None),
    )
