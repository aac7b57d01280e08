"""The session of a process with ZooKeeper, by kazoo's client."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, cast

from kazoo import exceptions
from kazoo.client import KazooClient
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from fencelock import _events, _threads
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock._generators import Steps
from fencelock.authority.hosts import Hosts, parse, shown
from fencelock.authority.line.entries import Exchange
from fencelock.authority.loops import ThreadWakeup, Wait, Wakeup

logger: logging.Logger = logging.getLogger("fencelock.authority")

_PORT: Final = 2181
#: Seconds for a server to accept a connection, and for each answer before the session is there; kazoo would
#: wait for the whole session timeout.
_CONNECT: Final = 1.2
_LOOK: Final = 0.5  # seconds between two checks whether the server is silent
_SILENT: Final = 1.5  # seconds after which a server that answers nothing is left for another one
_FAREWELL: Final = 0.5  # seconds that the end of a session may take
_CONNECTED: Final = "CONNECTED"
_SCHEMES: Final = ("zookeeper", "zookeepers")
_OPTIONS: Final = ("session_timeout", "ca", "cert", "key")
#: Errors of a request that may have been executed, and may be sent again.
AWAY: Final[tuple[type[Exception], ...]] = (
    exceptions.ConnectionClosedError,
    exceptions.ConnectionLoss,
    exceptions.NotReadOnlyCallError,
    exceptions.OperationTimeoutError,
    exceptions.SessionExpiredError,
    exceptions.SessionMovedError,
    exceptions.ThrottledOpError,
)

#: A request: a function that sends it, and returns kazoo's `AsyncResult`.
Request = Callable[[KazooClient], Any]


def _hide_login(record: logging.LogRecord) -> bool:
    """Keep the password out of kazoo's log: at DEBUG it has each request, and a login is one."""
    if isinstance(record.args, tuple) and any(type(each).__name__ == "Auth" for each in record.args):
        record.args = tuple("Auth(…)" if type(each).__name__ == "Auth" else each for each in record.args)
    return True


logging.getLogger("kazoo.client").addFilter(_hide_login)


class Watching(NamedTuple):
    """A step (see `_generators`): begin to watch for the deletion of a node; its result is a wakeup."""

    path: str


class Session:
    """A session with ZooKeeper, through kazoo's client, which asks for a session timeout of `seconds`.

    A thread of its own calls kazoo, because a signal handler that raises could leave kazoo's locks locked.
    """

    def __init__(self, hosts: Hosts, seconds: float, tls: ssl.SSLContext | None) -> None:
        self._hosts, self._seconds, self._tls = hosts, seconds, tls
        #: The session timeout that the servers have granted, in seconds; 0 before the first connection.
        self.timeout: float = 0.0
        self.renewals: int = 0  # how often a new session has replaced one that is over
        self._answered_at = -math.inf  # when the last answer came
        self.changes: int = 0  # how often the connection was lost or opened
        self._to_do: SimpleQueue[Callable[[KazooClient], object] | None] = SimpleQueue()
        self._closed = ThreadWakeup()
        _threads.start(threading.Thread(target=self._serve, name="fencelock-zookeeper", daemon=True))

    def _serve(self) -> None:
        client = self._new_client()
        while (work := self._to_do.get()) is not None:
            if self._is_over:
                # Servers that have lost their data would refuse this client for ever: it has seen newer data.
                threading.Thread(target=_end, args=(client,), daemon=True).start()
                self.renewals += 1
                client = self._new_client()
            try:
                work(client)
            except Exception:
                logger.exception("a request could not be sent to ZooKeeper")
        _end(client)
        self._closed.wake()

    @property
    def _is_over(self) -> bool:
        """Whether the session must have ended: for its timeout there was no connection, or no answer."""
        since = min(self._away_since, self._unanswered_since)
        return time.monotonic() > since + max(self._seconds, self.timeout)

    def _new_client(self) -> KazooClient:
        hosts = self._hosts
        options: dict[str, Any] = {}
        if hosts.user:
            options["auth_data"] = [("digest", f"{hosts.user}:{hosts.password}")]
            options["default_acl"] = [make_digest_acl(hosts.user, hosts.password, all=True)]
        client = KazooClient(
            hosts=",".join(map(shown, hosts.addresses)),
            timeout=self._seconds,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=1.5, max_delay=1.0),
            **options,
        )
        self._note_timeout(client)
        self._away_since, self._unanswered_since = time.monotonic(), math.inf
        client.add_listener(functools.partial(self._note_state, client))
        self._client = client
        client.start_async()
        return client

    def _note_timeout(self, client: KazooClient) -> None:
        """Limit what a connection may take, and store the granted session timeout; kazoo has neither.

        Open sockets with TLS here, too.
        """
        connection, handler = client._connection, cast("Any", client).handler  # noqa: SLF001
        connect, invoke, create = connection._connect, connection._invoke, handler.create_connection  # noqa: SLF001
        connection._invoke = lambda seconds, *rest, **named: invoke(min(seconds, _CONNECT), *rest, **named)  # noqa: SLF001

        def open_socket(*, address: Any, hostname: str, timeout: float, **_: object) -> socket.socket:
            plain: socket.socket = create(address=address, timeout=min(timeout, _CONNECT))
            if self._tls is None:
                return plain
            try:  # kazoo would trust the system's authorities beside the one of the URL
                return self._tls.wrap_socket(plain, server_hostname=hostname)
            except BaseException:
                plain.close()
                raise

        handler.create_connection = open_socket

        def connect_and_note(*address: Any) -> Any:
            read_timeout, connect_timeout = connect(*address)
            self.timeout = read_timeout * 1.5 / 1000.0  # read_timeout is two thirds, in milliseconds
            return read_timeout, connect_timeout

        connection._connect = connect_and_note  # noqa: SLF001

    def _note_state(self, client: KazooClient, state: str) -> None:
        if client is self._client:
            self.changes += 1
            self._away_since = math.inf if state == _CONNECTED else time.monotonic()
        if _events.listeners:
            where = ",".join(map(shown, self._hosts.addresses))
            if state == _CONNECTED:
                _events.tell(ConnectionOpened("ZooKeeper", where))
            else:
                _events.tell(ConnectionFailed("ZooKeeper", where, state))

    def close(self) -> None:
        """End the session, so that the servers delete its entries."""
        self._to_do.put(None)
        self._closed.sleep(_FAREWELL)

    def _begin(self, requests: Sequence[Request], done: Callable[[], object]) -> list[Any]:
        """Send requests; return a list that gets the results. Call `done` when all came, or none is sent."""
        results: list[Any] = []
        missing: list[Request] = list(requests)

        def note(_: object) -> None:
            self._unanswered_since, self._answered_at = math.inf, time.monotonic()
            missing.pop()
            if not missing:
                done()

        def send(client: KazooClient) -> None:
            if self._away_since < math.inf:
                # Without a connection, kazoo would send them later, when they rely on old data.
                done()
                return
            self._unanswered_since = min(self._unanswered_since, time.monotonic())
            results.extend(request(client) for request in requests)
            for result in results:
                result.rawlink(note)

        self._to_do.put(send)
        return results

    def _leave_silent(self, began: float) -> None:
        """Take the session to another server, if this one has answered nothing since a request began."""
        if time.monotonic() - max(began, self._answered_at) > _SILENT:
            with contextlib.suppress(AttributeError, OSError):  # kazoo has closed it meanwhile
                self._client._connection._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001

    def exchanging(self, step: Exchange, wakeup: Wakeup) -> Steps[list[Any]]:
        """Send requests; return the result of each, or its error; raise OSError without an answer."""
        if not step.requests:
            return []
        began = time.monotonic()
        over: list[bool] = []

        def finish() -> None:
            over.append(True)
            wakeup.wake()

        results = self._begin(step.requests, finish)
        while not over:
            now = time.monotonic()
            if now >= began + step.seconds:
                raise TimeoutError("no server answered in time")
            yield Wait(min(began + step.seconds, now + _LOOK), wakeup)
            if not over:
                self._leave_silent(began)
        return _outcomes(results)

    def watch(self, path: str, wakeup: Any) -> Watch:
        watch = Watch(self._to_do.put, path, wakeup)
        self._to_do.put(watch.begin)
        return watch


class Watch:
    """The wakeup that ends a step `Wait` when a node is gone or changed, or the connection is lost."""

    def __init__(self, do: Callable[[Callable[[KazooClient], Any]], object], path: str, wakeup: Any) -> None:
        self.over: bool = False
        self._do, self._path, self._wakeup = do, path, wakeup
        self.sleep: Any = wakeup.sleep

    def begin(self, client: KazooClient) -> None:
        self._begun = client.exists_async(self._path, watch=self._ring)
        self._begun.rawlink(self._look)

    def _look(self, result: Any) -> None:
        if not result.successful() or result.value is None:
            self._ring()

    def _ring(self, _event: object = None) -> None:
        self.over = True
        self._wakeup.wake()

    def close(self) -> None:
        """Remove the watch, because kazoo would keep it while the node exists."""
        if not self.over:
            self._do(lambda client: self._begun.rawlink(lambda _: self._forget(client)))

    def _forget(self, client: KazooClient) -> None:
        client._data_watchers.get(self._path, set()).discard(self._ring)  # noqa: SLF001


def _end(client: KazooClient) -> None:
    with contextlib.suppress(Exception):  # whatever kazoo raises if it was never connected
        client.stop()
        client.close()


def _outcomes(results: Sequence[Any]) -> list[Any]:
    if not results:
        raise ConnectionError("not connected to any server")
    outcomes = [result.value if result.successful() else result.exception for result in results]
    for outcome in outcomes:
        for each in outcome if isinstance(outcome, list) else [outcome]:  # a transaction has several
            if isinstance(each, AWAY):
                raise ConnectionError(type(each).__name__)
    return outcomes


def hosts_of(url: str) -> tuple[Hosts, float]:
    """Return the parts of a URL, and the session timeout in its query, or 0."""
    hosts = parse(url, _SCHEMES, _PORT, _OPTIONS)
    given = hosts.options.get("session_timeout", "0")
    try:
        return hosts, float(given)
    except ValueError:
        raise ValueError(f"session_timeout={given!r} is no number of seconds") from None
