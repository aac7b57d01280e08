"""One node: how to reach it, proof of which server process answers, and its socket.

A token is safe only if the answers on a socket come from the server process that was there when the
socket was opened. So the run_id is read right after connecting and belongs to that socket for good; the
scripts compare it with the one that the node was admitted with. Nothing here ever reconnects, retries or
resends on another socket: a client that silently reconnected after its node had been killed was granted
the same counter twice.

redis-py opens the connection, with its TLS, ACL and socket settings; afterwards the bare socket is
written to and read from here, so that commands to N nodes can be under way at once without threads.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import socket
import ssl
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol import SYNC, Answer, Command, Said
from fencelock.errors import MembershipError

#: What a node is made of.
Source = str | redis.Redis | redis.asyncio.Redis

#: Settings of a client's pool that would make a connection do things by itself.
_NOT_OURS = frozenset(
    {
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
#: Connections are opened in threads, in asyncio code too: TLS, ACL and sockets are set the same way.
_BLOCKING_TWINS: Final[dict[Any, Any]] = {
    redis.asyncio.Connection: redis.Connection,
    redis.asyncio.SSLConnection: redis.SSLConnection,
    redis.asyncio.UnixDomainSocketConnection: redis.UnixDomainSocketConnection,
}
#: Error replies of a server that is on its way up, or about to be promoted.
_PASSING_ERRORS = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY")
_GRANTED: Final = Said.GRANTED
_SAID: Final = {said.name.encode(): said for said in Said}
_READ_SIZE = 65536
_OWN_ARGUMENTS: Final = 2
_WITH_FACTS: Final = frozenset({Said.TICKET, Said.ADMITTED, Said.OPENED, Said.STANDING, Said.LEASES})
_TELLING = _WITH_FACTS | {Said.EXTENDED, Said.GRANTED, Said.HIGHER, Said.HELD}
#: Answers that are complete with their first word. That of WAITAOF is how many disks it is on.
_BARE: Final[dict[bytes | int, Answer]] = {
    **{name: Answer(said) for name, said in _SAID.items() if said not in _TELLING},
    0: Answer(Said.NOT_ON_DISK),
    1: Answer(Said.ON_DISK),
}


def _load_scripts() -> dict[str, str]:
    scripts: dict[str, str] = {}
    prelude = ""
    folder = importlib.resources.files(__package__).joinpath("scripts")
    for room in (folder, folder.joinpath("membership")):
        files = [file for file in room.iterdir() if file.is_file()]
        texts = {file.name.removesuffix(".lua"): file.read_text() for file in files}
        prelude += texts.pop("prelude")
        scripts |= {name: prelude + text for name, text in texts.items()}
    return scripts


_SCRIPTS: Final = _load_scripts()
_DIGESTS: Final = {
    name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in _SCRIPTS.items()
}


_EVERYDAY: Final = ("acquire", "confirm", "release", "extend")


class Unusable(Exception):  # noqa: N818 - it carries a node's answer, and is never seen by users
    """The node cannot be used; `answer` is what to report as its answer."""

    def __init__(self, said: Said, detail: str) -> None:
        super().__init__(detail)
        self.answer = Answer(said, detail=detail)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answered on a socket when it was opened.

    Attributes:
        run_id: random id of the server process; a restart changes it.
        replid: its replication id, where every vote must prove it again; otherwise empty.
        node_id: the node's own id, given when it was initialised; empty while it is blank.
        membership: the list that it belongs to; None while it is blank.
    """

    run_id: str
    replid: str
    node_id: str
    membership: Membership | None

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list.

        Raises:
            MembershipError: if the list cannot be read.
        """
        return replace(self, node_id=node_id, membership=Membership.from_json(members))


class Node:
    """Where a node is, and how to open a socket to it.

    Args:
        source: a URL (`redis://`, `rediss://`, `unix://`), or a `redis.Redis` or `redis.asyncio.Redis`,
            whose settings are kept.
        connect_timeout: seconds for connecting and for each answer while doing so.
        verify_votes: have every vote prove its server process, also where the socket would do.

    Raises:
        ValueError: if the URL cannot be understood.
        TypeError: if it is neither a URL nor a client.
    """

    def __init__(self, source: Source, connect_timeout: float, *, verify_votes: bool) -> None:
        self._verify_votes = verify_votes
        self._connection_class, settings = _connection_of(source)
        self._settings: dict[str, Any] = {
            **{name: value for name, value in settings.items() if name not in _NOT_OURS},
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": connect_timeout,
            "socket_timeout": connect_timeout,
        }
        try:
            self._connection_class(**self._settings)  # opens nothing yet, but knows its settings
        except TypeError as error:
            raise ValueError(f"{_masked(str(source))!r} has a setting that is unknown: {error}") from None
        self.name = _name_of(self._connection_class, self._settings)
        login = f"{self._settings.get('username') or ''}:PASSWORD@" if self._settings.get("password") else ""
        self.url_to_type = _name_of(self._connection_class, self._settings, login)

    def open(self, node_key: str) -> Link:
        """Connect, and learn who is there.

        Raises:
            Unusable: with what to report as the node's answer.
        """
        connection = self._connection_class(**self._settings)
        try:
            connection.connect()
            identity = _identify(connection, node_key, verify_votes=self._verify_votes)
            _bring_scripts(connection)
        except Unusable:
            connection.disconnect()
            raise
        except Exception as error:
            # Whatever a stranger on that port says, or a user's own connection class raises.
            connection.disconnect()
            raise _why(error) from error
        # From here on the socket is ours; the connection object must never touch it again.
        sock: socket.socket = connection._sock  # noqa: SLF001 - redis-py has no public name for it
        connection._sock = None  # noqa: SLF001
        return Link(sock, identity)


def _why(error: Exception) -> Unusable:
    """Return what an error while connecting means for the use of the node."""
    if isinstance(error, MembershipError):
        return Unusable(Said.CONFIG, str(error))
    if isinstance(error, (RedisTimeoutError, TimeoutError)):
        return Unusable(Said.SILENT, "it took no connection in time")
    if isinstance(error, AuthenticationError):
        return Unusable(Said.ERROR, f"it refused the user or password: {error}")
    if isinstance(error, ResponseError):
        passing = str(error).startswith(_PASSING_ERRORS)
        return Unusable(Said.UNREACHABLE if passing else Said.ERROR, str(error))
    if isinstance(error, InvalidResponse) or not isinstance(error, (RedisError, OSError)):
        return Unusable(Said.ERROR, f"it does not speak like a node: {error!r}")
    return Unusable(Said.UNREACHABLE, str(error))


def _connection_of(source: Source) -> tuple[Any, dict[str, Any]]:
    """Return the class of blocking connections to a node, and their settings."""
    if isinstance(source, str):
        pool = _pool_of(source)
        return pool.connection_class, pool.connection_kwargs
    if isinstance(source, redis.Redis):
        return source.connection_pool.connection_class, source.connection_pool.connection_kwargs
    if not isinstance(source, redis.asyncio.Redis):
        raise TypeError(
            "a node is a redis:// URL, a redis.Redis or a redis.asyncio.Redis client, "
            f"not {type(source).__name__}"
        )
    theirs = source.connection_pool.connection_class
    if theirs not in _BLOCKING_TWINS or source.connection_pool.connection_kwargs.get("redis_connect_func"):
        raise TypeError(
            f"this redis.asyncio client connects in a way of its own ({theirs.__name__}), which cannot be "
            "repeated here: name the node by its URL, or by a redis.Redis client"
        )
    return _BLOCKING_TWINS[theirs], source.connection_pool.connection_kwargs


def _pool_of(url: str) -> redis.ConnectionPool:
    shown = _masked(url)
    try:
        pool = redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise ValueError(
            f"{shown!r} is no URL of a Redis node ({error}); write redis://host:6379, "
            "rediss://user:password@host:6380 or unix:///path/to/socket"
        ) from None
    if not url.startswith("unix://") and not urlsplit(url).hostname:
        raise ValueError(f"{shown!r} names no host; write redis://host:6379")
    return pool


def _masked(url: str) -> str:
    head, at, tail = url.partition("?")[0].rpartition("@")
    return f"{head.partition(':')[0]}://***@{tail}" if at else tail


def _name_of(connection_class: Any, settings: dict[str, Any], login: str = "") -> str:
    """Return the node's address, as a URL without its password."""
    if "path" in settings:
        return f"unix://{login}{settings['path']}"
    scheme = "rediss" if issubclass(connection_class, redis.SSLConnection) else "redis"
    database = f"/{settings['db']}" if settings.get("db") else ""
    return f"{scheme}://{login}{settings.get('host', 'localhost')}:{settings.get('port', 6379)}{database}"


def _identify(connection: Any, node_key: str, *, verify_votes: bool) -> Identity:
    connection.send_command("INFO")
    info = dict(
        line.split(":", 1)
        for line in connection.read_response().decode(errors="replace").splitlines()
        if ":" in line
    )
    if info.get("role") not in {"master", None}:
        raise Unusable(Said.ERROR, f"it is a {info['role']}, and only primaries grant locks")
    if "run_id" not in info:
        raise Unusable(Said.ERROR, "its INFO has no run_id, so a restart could not be noticed")
    # One-to-one TCP to a lone primary: a restart breaks the connection. With anything that can be
    # promoted in its place, the same run_id may answer on the same socket with older data.
    # A backlog says that there has been a replica, though it may be detached at this moment.
    company = ("connected_slaves", "cluster_enabled", "repl_backlog_active")
    verify = verify_votes or any(info.get(fact, "0") != "0" for fact in company)
    replid = info.get("master_replid", "") if verify else ""
    if verify and not replid:
        raise Unusable(Said.ERROR, "its INFO has no master_replid, so a failover could not be noticed")
    connection.send_command("HMGET", node_key, "id", "members")
    node_id, members = connection.read_response()
    blank = Identity(info["run_id"], replid, "", None)
    return blank.admitted(node_id.decode(), members.decode()) if members else blank


def _bring_scripts(connection: Any) -> None:
    """Give a node the everyday scripts that it does not know.

    Otherwise the first ACQUIRE is answered with NOSCRIPT; where a majority has granted before that is read,
    the node would have no lock, for as long as nobody reads.
    """
    try:
        connection.send_command("SCRIPT EXISTS", *(_DIGESTS[name] for name in _EVERYDAY))
        for name, known in zip(_EVERYDAY, connection.read_response(), strict=True):
            if not known:
                connection.send_command("SCRIPT LOAD", _SCRIPTS[name])
                connection.read_response()
    except ResponseError:
        return  # this user may not: then each is brought along when it is first called


def pack(command: Command) -> bytes:
    """Return the part of a command that is the same for every node; the socket appends its own."""
    if command.script == SYNC.script:
        waitaof: bytes = hiredis.pack_command(("WAITAOF", *command.arguments))  # type: ignore[arg-type]
        return waitaof
    return _pack(command, "EVALSHA", _DIGESTS[command.script])


def _pack(command: Command, verb: str, script: str) -> bytes:
    words = (verb, script, len(command.keys), *command.keys, *command.arguments)
    return b"*%d\r\n" % (len(words) + _OWN_ARGUMENTS) + _pack_words(words)


def _pack_words(words: tuple[str | int, ...]) -> bytes:
    """Return the words of a command without the line that counts them."""
    # The stub of hiredis knows tuples of one word only.
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]
    return packed[packed.index(b"\n") + 1 :]


def read_answer(reply: Any) -> Answer:
    """Return what a node's reply to a script means."""
    if isinstance(reply, hiredis.ReplyError):
        text = str(reply)
        said = Said.UNREACHABLE if text.startswith(_PASSING_ERRORS) else Said.ERROR
        return Answer(said, detail=text)
    word = reply[0]
    if word == b"GRANTED":  # first, for most are that or bare
        return Answer(_GRANTED, reply[1], tuple(reply[2:]))
    if (bare := _BARE.get(word)) is not None:
        return bare
    said = _SAID[word]
    if said is Said.HELD:
        # A lock without an end was put there by somebody else than a client of ours.
        return Answer(said, ttl=reply[1] / 1000 if reply[1] >= 0 else math.inf)
    if said in _WITH_FACTS:
        return Answer(said, facts=tuple(part.decode() for part in reply[1:]))
    return Answer(said, reply[1], tuple(reply[2:]))


class Link:
    """An open socket to one node: written and read without waiting, answers in the order of the requests.

    Where a write or a read is interrupted by an exception from outside, such as a signal handler's, the
    link must not be used again: answers could no longer be told apart.

    Attributes:
        identity: who answered when the socket was opened.
        descriptor: the socket's, for polling.
        waiting: what has been sent and not been answered: for each a number that means something to
            the sender, the command, and when it was sent.
        releasing: nonces of which a RELEASE is among those.
        unsent: what has been put here and not been written yet.
    """

    __slots__ = (
        "_own_arguments",
        "_pending",
        "_reader",
        "_sock",
        "descriptor",
        "identity",
        "releasing",
        "unsent",
        "waiting",
    )

    def __init__(self, sock: socket.socket, identity: Identity) -> None:
        sock.setblocking(False)  # noqa: FBT003 - the standard library's signature
        self._sock = sock
        # With TLS, data may wait inside the socket object where no poll sees it.
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else None
        self._reader = hiredis.Reader()
        self._own_arguments = _pack_words((identity.run_id, identity.replid))
        self.identity = identity
        self.descriptor = sock.fileno()
        self.waiting: deque[tuple[int, Command, float]] = deque()
        self.releasing: set[str] = set()
        self.unsent: list[bytes] = []

    def close(self) -> None:
        """Close the socket. In a forked child this leaves the parent's alone."""
        self._sock.close()

    def put(self, number: int, command: Command, packed: bytes, now: float) -> None:
        """Take a command, whose common part has been packed, for the next `flush`."""
        self.waiting.append((number, command, now))
        if command.script == "release":
            self.releasing.add(command.nonce)
        # All scripts have a key.
        self.unsent.append(packed + self._own_arguments if command.keys else packed)

    def flush(self) -> bool:
        """Write what has been put here, as far as the socket takes it; return whether that was all.

        Raises:
            Unusable: if the connection is broken.
        """
        data = self.unsent[0] if len(self.unsent) == 1 else b"".join(self.unsent)
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        except OSError as error:
            raise Unusable(Said.UNREACHABLE, f"the connection broke: {error}") from error
        complete = sent == len(data)
        self.unsent = [] if complete else [data[sent:]]
        return complete

    def send(self, number: int, command: Command, packed: bytes, now: float) -> None:
        """Send a command at once.

        Raises:
            Unusable: if the connection is broken or its buffer is full.
        """
        self.put(number, command, packed, now)
        if not self.flush():
            raise Unusable(Said.SILENT, "it reads nothing any more")

    def receive(self, now: float) -> list[tuple[int, Command, Answer]]:
        """Return the answers that have arrived, with what they answer.

        Commands whose script the node did not know are put here again, with its text, for a `flush`.

        Raises:
            Unusable: if the connection is broken, or what answers is no node.
        """
        data = self._read()
        if data is None:
            return []
        answers = []
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                number, command, _ = self.waiting.popleft()
                if type(reply) is not list and str(reply).startswith("NOSCRIPT"):
                    # On the same socket, or who knows which server process would answer.
                    self.put(number, command, _pack(command, "EVAL", _SCRIPTS[command.script]), now)
                else:
                    answers.append((number, command, read_answer(reply)))
        except (hiredis.HiredisError, LookupError, TypeError, ValueError) as error:
            raise Unusable(Said.ERROR, f"it does not speak like a node: {error!r}") from error
        return answers

    def subscribe(self, channel: str) -> None:
        """Listen to a channel; from now on the link is good for `messages` only.

        Raises:
            Unusable: if the connection is broken.
        """
        try:
            self._sock.send(hiredis.pack_command(("SUBSCRIBE", channel)))  # type: ignore[arg-type]
        except OSError as error:
            raise Unusable(Said.UNREACHABLE, f"the connection broke: {error}") from error

    def messages(self) -> list[bytes | None]:
        """Return what has arrived on the channel; None says that the subscription stands now.

        Raises:
            Unusable: if the connection is broken, or the user has no right to the channel.
        """
        data = self._read()
        arrived: list[bytes | None] = []
        try:
            self._reader.feed(data or b"")
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise Unusable(Said.ERROR, f"it does not let this user listen: {reply}")
                arrived.append(reply[2] if reply[0] == b"message" else None)
        except (hiredis.HiredisError, LookupError, TypeError) as error:
            raise Unusable(Said.ERROR, f"it does not speak like a node: {error!r}") from error
        return arrived

    def _read(self) -> bytes | None:
        """Return what has arrived; None where that is nothing.

        Raises:
            Unusable: if the connection is broken.
        """
        try:
            data = self._sock.recv(_READ_SIZE)
            while self._pending is not None and self._pending():
                data += self._sock.recv(_READ_SIZE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except OSError as error:
            raise Unusable(Said.UNREACHABLE, f"the connection broke: {error}") from error
        if not data:
            raise Unusable(Said.UNREACHABLE, "the connection broke: closed by the node")
        return data
