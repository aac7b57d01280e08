"""What the URL or the client of a node says of where it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from fencelock.authority.redlock.endpoints.places import PORT, Place, Sentinels, Server, Servers

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


_FORMS: Final = (
    "redis://host:6379, rediss://user:password@host:6380, unix:///path/to/socket, "
    "redis+sentinel://host1:26379,host2:26379,host3:26379/SERVICE or redis+cluster://host1:6379,host2:6379 "
    "(or valkey, valkeys)"
)


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


def sources_of(nodes: Source | Sequence[Source]) -> list[Source]:
    """Return the nodes that an argument names, each by itself.

    Raises:
        ValueError: there is none.
    """
    if isinstance(nodes, str):
        sources: list[Source] = [*split_urls(nodes)]
    else:
        sources = [cast("Source", nodes)] if is_source(nodes) else list(cast("Sequence[Source]", nodes))
    if not sources:
        raise ValueError("no nodes are named; write redis://host1:6379,redis://host2:6379,redis://host3:6379")
    return sources


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
    parts = _Parts.of(url, group["rest"], PORT)
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
