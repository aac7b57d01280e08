"""The session of a process with ZooKeeper, by kazoo's client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import (
    ConnectionClosedError,
    ConnectionLoss,
    NotReadOnlyCallError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
)
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from fencelock import _events
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock.authority.hosts import Hosts, parse, shown
from fencelock.authority.loops import Bell

_PORT: Final = 2181
_SCHEMES: Final = ("zookeeper", "zookeepers")
_OPTIONS: Final = ("session_timeout", "ca", "cert", "key")
#: What a request ends with that may be sent again: nobody can tell whether it was done.
AWAY: Final = (
    ConnectionClosedError,
    ConnectionLoss,
    NotReadOnlyCallError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
)

#: A request: it begins, and returns kazoo's `AsyncResult`.
Request = Callable[[KazooClient], Any]


class Requests(NamedTuple):
    """A step: requests that are sent together, in this order; it returns what became of each."""

    requests: Sequence[Request]
    seconds: float


class Watching(NamedTuple):
    """A step: begin to watch whether a node is there; it returns a bell."""

    path: str


class Session:
    """A session. kazoo makes a new one when it has expired.

    Args:
        url: of the servers.
        seconds: the session timeout to ask for.
    """

    def __init__(self, hosts: Hosts, seconds: float) -> None:
        self._hosts = hosts
        options: dict[str, Any] = {}
        if hosts.scheme == "zookeepers":
            its = hosts.options
            options = {"use_ssl": True, "check_hostname": True, "ca": its.get("ca")}
            options |= {"certfile": its.get("cert"), "keyfile": its.get("key")}
        if hosts.user:
            options["auth_data"] = [("digest", f"{hosts.user}:{hosts.password}")]
            options["default_acl"] = [make_digest_acl(hosts.user, hosts.password, all=True)]
        self._client = KazooClient(
            hosts=",".join(map(shown, hosts.addresses)),
            timeout=seconds,
            connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=1.5, max_delay=1.0),
            **options,
        )
        #: Seconds after which the servers end the session, as they have told.
        self.timeout = 0.0
        self._is_open = threading.Event()
        self._note_timeout()
        self._client.add_listener(self._tell)
        self._client.start_async()

    def _note_timeout(self) -> None:
        """Learn the timeout on which the servers insist: kazoo tells it to nobody but itself."""
        connection = self._client._connection  # noqa: SLF001
        connect = connection._connect  # noqa: SLF001

        def connect_and_note(*address: Any) -> Any:
            read_timeout, connect_timeout = connect(*address)
            self.timeout = read_timeout * 1.5 / 1000.0  # it is two thirds, in milliseconds
            self._is_open.set()
            return read_timeout, connect_timeout

        connection._connect = connect_and_note  # noqa: SLF001

    def _tell(self, state: str) -> None:
        if _events.listeners:
            where = ",".join(map(shown, self._hosts.addresses))
            if state == "CONNECTED":
                _events.tell(ConnectionOpened("ZooKeeper", where))
            else:
                _events.tell(ConnectionFailed("ZooKeeper", where, state))

    def close(self) -> None:
        """End the session. Its entries go at once."""
        with contextlib.suppress(Exception):  # whatever kazoo says of a connection that was never there
            self._client.stop()
            self._client.close()

    def send(self, step: Requests) -> list[Any]:
        return [request(self._client) for request in step.requests]

    def exchange(self, step: Requests) -> list[Any]:
        """Send requests; return the result of each, or its error.

        Raises:
            OSError: there was no answer, or no connection.
        """
        until = time.monotonic() + step.seconds
        if not self._is_open.wait(step.seconds):
            raise TimeoutError("no server could be connected to")
        results = self.send(step)
        for result in results:
            if not result.wait(max(0.0, until - time.monotonic())):
                raise TimeoutError("no server answered in time")
        return _outcomes(results)

    async def exchange_soon(self, step: Requests) -> list[Any]:
        """Send requests, as `exchange` does; other tasks run meanwhile."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(step.seconds):
            while not self._is_open.is_set():  # noqa: ASYNC110 - kazoo's thread sets it, once
                await asyncio.sleep(0.005)
            results = self.send(step)
            done = loop.create_future()
            left = [len(results)]

            def finish() -> None:
                if not done.done():
                    done.set_result(None)

            def note(_: object) -> None:  # in kazoo's thread
                left[0] -= 1
                if not left[0]:
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(finish)

            for result in results:
                result.rawlink(note)
            if results:
                await done
        return _outcomes(results)

    def watch(self, path: str, bell: Bell) -> Watch:
        return Watch(self._client, path, bell)


class Watch:
    """Rings when a node has gone, and when the connection is lost: a bell for the step `Wait`."""

    def __init__(self, client: KazooClient, path: str, bell: Any) -> None:
        self.over = False
        self._bell = bell
        self.sleep = bell.sleep
        client.exists_async(path, watch=self._ring).rawlink(self._look)

    def _look(self, result: Any) -> None:
        if not result.successful() or result.value is None:
            self._ring()

    def _ring(self, _event: object = None) -> None:
        self.over = True
        self._bell.ring()

    def close(self) -> None:
        """Do nothing: the watch ends with the node."""


def _outcomes(results: Sequence[Any]) -> list[Any]:
    outcomes = [result.value if result.successful() else result.exception for result in results]
    for outcome in outcomes:
        if isinstance(outcome, AWAY):
            raise ConnectionError(type(outcome).__name__)
    return outcomes


def hosts_of(url: str) -> tuple[Hosts, float]:
    """Return what a URL names, and the session timeout in its query or 0."""
    hosts = parse(url, _SCHEMES, _PORT, _OPTIONS)
    given = hosts.options.get("session_timeout", "0")
    try:
        return hosts, float(given)
    except ValueError:
        raise ValueError(f"session_timeout={given!r} is no number of seconds") from None
