"""Where a node is: its URL or client, and the servers to connect to at the moment.

Behind Sentinel and in a Redis Cluster another server may take over. So each connection asks where to go.
A server process that was not admitted to the quorum never votes: it can only refuse.
"""

from __future__ import annotations

import re
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote, unquote

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import MovedError, ResponseError
from redis.retry import Retry

Source = str | redis.Redis | redis.RedisCluster  # a node as a user names it

#: Settings of a client that are ignored: fencelock has its own, or a connection would send commands unasked.
_NOT_OURS: Final = re.compile(
    r"connection_pool|decode_responses|event_dispatcher|health_check_interval|himport_registry|legacy_responses"
    r"|protocol|(encoder|parser)_class|(maint|orig)_.*|retry.*|sentinel_(username|password)"
)

_CHECKS_NAMES: Final = 6  # the first version of redis-py whose clients check host names by default
#: Values of `ssl_cert_reqs` with which no certificate is checked, so that no name can be checked.
_UNCHECKED: Final = (None, "none", ssl.CERT_NONE)
#: Plain classes of connections, because a connection to a primary must not ask the sentinels.
_PLAIN: Final[dict[Any, Any]] = {
    redis.sentinel.SentinelManagedConnection: redis.Connection,
    redis.sentinel.SentinelManagedSSLConnection: redis.SSLConnection,
}

#: Scheme, kind, login, hosts, path and query.
_GROUP_URL: Final = re.compile(r"(?s)(rediss?)\+(sentinel|cluster)://([^/?]*@)?([^/?@]*)/?([^?]*?)/?(\?.*)?")

_FORMS: Final = (
    "redis://host:6379, rediss://user:password@host:6380, unix:///path/to/socket, "
    "redis+sentinel://host1:26379,host2:26379,host3:26379/SERVICE or redis+cluster://host1:6379,host2:6379 "
    "(or valkey, valkeys)"
)


class _TextPacker(HiredisRespSerializer):
    """Packs commands of redis-py itself, such as `SELECT 0`, as text for hiredis: see `pack_words`."""

    def pack(self, *args: Any) -> Any:
        words: list[Any] = [arg if isinstance(arg, str | bytes) else str(arg) for arg in args]
        return super().pack(*words)


@dataclass(frozen=True, slots=True)
class Server:
    """One address, and how to connect to it: a class of blocking connections, and its keyword arguments."""

    connection_class: Any
    settings: Mapping[str, Any] = field(repr=False)

    def new_connection(self, protocol: int = 3) -> Any:
        return self.connection_class(**{**self.settings, "protocol": protocol})

    def at(self, host: str, port: int) -> Server:
        return replace(self, settings={**self.settings, "host": host, "port": port})

    @property
    def address(self) -> str:
        if "path" in self.settings:
            return str(self.settings["path"])
        host, port = self.settings.get("host", "localhost"), self.settings.get("port", 6379)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a node is."""

    kind: str  # "sentinel", "cluster", or empty for one server
    server: Server  # how to connect to the server of the node; behind Sentinel, the address is replaced
    named: Sequence[Server]  # the sentinels, the servers of the cluster, or the one server
    service: str = ""  # the name that the sentinels know the node by
    #: Turns the host and port that a sentinel or a server tells into those to connect to.
    remap: Callable[[str, int], tuple[str, int]] = lambda host, port: (host, port)

    def url(self, *, to_type: bool = False) -> str:
        """Return the endpoint as a URL without its password; `to_type` puts a placeholder in its place."""
        settings = self.server.settings
        is_tls = issubclass(self.server.connection_class, redis.SSLConnection)
        scheme = "unix" if "path" in settings else "rediss" if is_tls else "redis"
        login = f"{settings.get('username') or ''}:PASSWORD@" if to_type and settings.get("password") else ""
        hosts = ",".join(sorted(server.address for server in self.named))
        service = self.service and f"/{quote(self.service, safe='')}"
        database = f"/{settings['db']}" if settings.get("db") and "path" not in settings else ""
        return f"{scheme}{self.kind and '+' + self.kind}://{login}{hosts}{service}{database}"

    def servers(self) -> Sequence[Server]:
        """Return the servers to try, in this order; behind Sentinel, the primary.

        A majority of the sentinels must name the same primary. A minority may be cut off together with a
        primary that was replaced. A recovery would then bring this old primary to the epoch in which its
        successor votes: one node with two votes. Also, one dishonest sentinel cannot get the password.
        """
        if self.kind != "sentinel":
            return self.named
        needed = len(self.named) // 2 + 1
        told: Counter[tuple[str, int]] = Counter()
        failures: list[str] = []
        for sentinel in self.named:
            try:
                services = _services_of(sentinel)
            except Exception as error:  # noqa: BLE001 - whatever another program on that port says
                failures.append(f"{sentinel.address}: {error}")
                continue
            if self.service not in services:
                raise ResponseError(
                    f"the sentinel {sentinel.address} knows no service {self.service!r}; "
                    f"those that it knows: {', '.join(sorted(services)) or 'none'}"
                )
            told[services[self.service]] += 1
            if told[services[self.service]] == needed:
                return [self.server.at(*self.remap(*services[self.service]))]
        if told.total() >= needed:
            named = ", ".join(f"{host}:{port} ({count})" for (host, port), count in told.most_common())
            failures.insert(0, f"they name different primaries, as after a failover: {named}")
        raise redis.ConnectionError(
            f"{told.total()} of its {len(self.named)} sentinels answer, and a majority is {needed}: "
            f"{'; '.join(failures)}"
        )

    def redirected(self, server: Server, error: Exception) -> Server | None:
        """Return where a server of a cluster sends us, if its error says so: MOVED slot host:port.

        Only for a node that was named as a cluster, because the other server gets the password.
        """
        if not is_moved(error) or self.kind != "cluster" or "path" in server.settings:
            return None
        host, _, port = str(error).split()[-1].rpartition(":")
        own = server.settings.get("host", "localhost")
        return server.at(*self.remap(own if host in {"", "?"} else host, int(port)))


def is_moved(error: Exception) -> bool:
    """Return whether an error says that another server has the keys; redis-py cuts off the word MOVED."""
    return isinstance(error, MovedError) or str(error).startswith("MOVED ")


def _services_of(sentinel: Server) -> dict[str, tuple[str, int]]:
    """Return the services that a sentinel watches: host and port of the primary of each."""
    connection = sentinel.new_connection(protocol=2)
    try:
        connection.connect()
        connection.send_command("SENTINEL", "MASTERS")
        words = [[word.decode() for word in flat] for flat in connection.read_response()]
    finally:
        connection.disconnect()
    services = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in words]
    return {each["name"]: (each["ip"], int(each["port"])) for each in services}


def sources_of(nodes: Source | Sequence[Source]) -> list[Source]:
    """Return the nodes that an argument names, one by one; raise ValueError if there are none."""
    named: Any = split_urls(nodes) if isinstance(nodes, str) else nodes
    sources: list[Source] = list(named) if isinstance(named, Sequence) else [named]
    if not sources:
        raise ValueError("no nodes are named; write redis://host1:6379,redis://host2:6379,redis://host3:6379")
    return sources


def split_urls(text: str) -> list[str]:
    """Return the URLs of a text with commas between them; one URL may have several hosts."""
    urls = re.split(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)", text)
    return [url for url in (each.strip(", \t\r\n") for each in urls) if url]


def _masked(url: str) -> str:
    """Return a URL for an error message, without the parts that may hold a password."""
    hidden = re.sub(r"(?s)^([^:]*).*@", r"\1://***@", url).partition("?")[0]
    return re.sub(r"(?s)^([^:]*://[^/@]*):(?!\d+(?:/|$)).*", r"\1:***", hidden) if "@" not in url else hidden


def as_redis(url: str) -> str:
    return re.sub(r"^valkey(s?)(?=\+|:)", r"redis\1", url)


def endpoint_of(source: Source, timeout: float) -> Endpoint:
    """Return where a node is; `timeout` is the seconds for connecting, and for each answer while doing so."""
    try:
        if isinstance(source, str):
            return _of_url(as_redis(source), timeout)
        if isinstance(source, redis.RedisCluster):
            return _of_cluster(source, timeout)
        if isinstance(source, redis.Redis):
            return _of_pool(source.connection_pool, timeout)
    except ValueError as error:
        shown = repr(_masked(source)) if isinstance(source, str) else f"a client, {type(source).__name__},"
        raise ValueError(f"{shown} {error}") from None
    raise TypeError(
        f"a node is a URL ({_FORMS}), or a client of redis-py, redis.Redis or redis.RedisCluster, in "
        f"asyncio code too; not {type(source).__module__}.{type(source).__name__}"
    )


def _server_of(pool: Any, timeout: float, **others: Any) -> Server:
    """Return the server to which a pool connects; `others` replaces some of its settings."""
    settings = {k: v for k, v in pool.connection_kwargs.items() if not _NOT_OURS.fullmatch(k)} | others
    settings |= {"retry": Retry(NoBackoff(), 0), "command_packer": _TextPacker()}
    settings |= {"socket_connect_timeout": timeout, "socket_timeout": timeout}
    is_tls = issubclass(pool.connection_class, redis.SSLConnection)
    if is_tls and settings.get("ssl_cert_reqs", ssl.CERT_REQUIRED) not in _UNCHECKED:
        settings.setdefault("ssl_check_hostname", True)
        # False is the default of older clients, and cannot be told from a choice.
        if int(redis.__version__.partition(".")[0]) < _CHECKS_NAMES:
            settings["ssl_check_hostname"] = True
    server = Server(_PLAIN.get(pool.connection_class, pool.connection_class), settings)
    try:
        server.new_connection()  # opens nothing yet, but raises for an unknown setting
    except TypeError as error:
        raise ValueError(f"has an unknown setting: {error}") from None
    return server


def _pool_of(url: str) -> Any:
    try:
        pool: Any = redis.ConnectionPool.from_url(url)
    except ValueError:  # its text may quote a part of the password
        why = "a port is a number, and a user with a password ends with @"
        raise ValueError(f"is no URL of a Redis node ({why}); write {_FORMS}") from None
    if not pool.connection_kwargs.keys() & {"host", "path"}:
        raise ValueError(f"names no host; write {_FORMS}")
    return pool


def _of_url(url: str, timeout: float) -> Endpoint:
    """Read the URL of a server, or of a group of servers.

    - `redis+cluster://[user:password@]host[:port][,…][?settings]`: any servers of a cluster.
    - `redis+sentinel://[user:password@]host[:port][,…]/service[/database][?settings]`. User and password are
      the primary's; `sentinel_username` and `sentinel_password` are the sentinels' own. Other settings, and
      TLS (`rediss+sentinel://`), are for both.
    """
    group = _GROUP_URL.fullmatch(url)
    if group is None:
        return _of_pool(_pool_of(url), timeout)
    scheme, kind, login, hosts, path, query = group.groups(default="")
    service, _, database = ("", "", path) if kind == "cluster" else path.partition("/")
    pools = [_pool_of(f"{scheme}://{login}{host.strip()}/{database}{query}") for host in hosts.split(",")]
    servers = [_server_of(pool, timeout) for pool in pools]
    if kind == "cluster":
        if path not in {"", "0"} or servers[0].settings.get("db"):
            raise ValueError("names a database, but a cluster has only one: leave the number out")
        return Endpoint(kind, servers[0], servers)
    if not service:
        raise ValueError(
            "names no service; write redis+sentinel://host1:26379,host2:26379/SERVICE, with the name after "
            "`sentinel monitor` in sentinel.conf"
        )
    if database and not database.isdecimal():
        raise ValueError("may have the number of a database after the service, and nothing else")
    settings = pools[0].connection_kwargs
    own = {"username": settings.get("sentinel_username"), "password": settings.get("sentinel_password")}
    sentinels = [
        _server_of(pool, timeout / 2, port=pool.connection_kwargs.get("port", 26379), db=0, **own)
        for pool in pools
    ]
    return Endpoint(kind, servers[0], sentinels, unquote(service))


def _of_pool(pool: Any, timeout: float) -> Endpoint:
    """Return where a pool connects to; a pool of Sentinel must be made by `Sentinel.master_for`."""
    if not isinstance(pool, redis.sentinel.SentinelConnectionPool):
        server = _server_of(pool, timeout)
        return Endpoint("", server, [server])
    if not pool.is_master:
        raise TypeError(
            "this client is for replicas, but only primaries grant locks: make it with `master_for`"
        )
    if pool.connection_class not in _PLAIN:
        raise TypeError(
            f"fencelock cannot repeat how this client connects ({pool.connection_class.__name__}): name the "
            "node by its URL"
        )
    manager, name = pool.sentinel_manager, pool.service_name
    server = _server_of(pool, timeout)
    sentinels = [_server_of(client.connection_pool, timeout / 2) for client in manager.sentinels]
    forced = getattr(manager, "_force_master_ip", None)
    return Endpoint("sentinel", server, sentinels, name, lambda host, port: (forced or host, port))


def _of_cluster(client: redis.RedisCluster, timeout: float) -> Endpoint:
    manager: Any = client.nodes_manager
    pool = client.get_redis_connection(next(iter(manager.nodes_cache.values()))).connection_pool
    # The client's own `redis_connect_func` may let replicas answer for their primary.
    server = _server_of(pool, timeout, redis_connect_func=None)
    named = getattr(client, "startup_nodes", None) or manager.startup_nodes.values()
    servers = [server.at(node.host, int(node.port)) for node in named]
    return Endpoint("cluster", server, servers, remap=manager.remap_host_port)
