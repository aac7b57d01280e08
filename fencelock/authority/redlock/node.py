"""One node: how to reach it, proof of which server process answers, and its socket.

A token is safe only if the answers on a socket come from the server process that was there when the
socket was opened. So the run_id is read right after connecting and belongs to that socket for good; the
scripts compare it with the one that the node was admitted with, and look whether that process has loaded
other data since. Nothing here ever reconnects, retries or
resends on another socket: a client that silently reconnected after its node had been killed was granted
the same counter twice.

redis-py opens the connection, with its TLS, ACL and socket settings; afterwards the bare socket is
written to and read from here, so that commands to N nodes can be under way at once without threads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import math
import re
import socket
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import hiredis
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    InvalidResponse,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from fencelock.authority.redlock import lingering
from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.places import (
    Nowhere,
    Place,
    Server,
    Source,
    members_of_cluster,
    place_of,
    redirection,
)
from fencelock.authority.redlock.protocol import SYNC, Answer, Command, Said
from fencelock.errors import MembershipError

#: Error replies of a server that is on its way up, about to be promoted, or no longer the one to ask.
_PASSING_ERRORS = (
    "LOADING",
    "BUSY",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "NOREPLICAS",
    "READONLY",
    "MOVED",
    "ASK",
)
#: The same as redis-py has them, which takes the first word away.
_PASSING_EXCEPTIONS = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)
#: What stands in error replies of a server that does not serve the keys any more. Another does by now.
_ELSEWHERE = ("MOVED", "ASK ", "READONLY")
_GRANTED: Final = Said.GRANTED
_SAID: Final = {said.name.encode(): said for said in Said}
_READ_SIZE = 65536
_OWN_ARGUMENTS: Final = 2
#: The node's, and that of a lock.
_KEYS_OF_ONE: Final = 2
_LEADING: Final = frozenset({Said.UNREACHABLE, Said.ERROR})
_WITH_FACTS: Final = frozenset(
    {Said.TICKET, Said.ADMITTED, Said.OPENED, Said.STANDING, Said.LEASES, Said.CLEARED}
)
_WITH_TTL: Final = frozenset({Said.HELD, Said.RESTARTED, Said.EARLY})
_TELLING = _WITH_FACTS | _WITH_TTL | {Said.EXTENDED, Said.GRANTED, Said.HIGHER, Said.MERGED}
#: Answers that are complete with their first word. That of WAITAOF is how many disks it is on.
_BARE: Final[dict[bytes | int, Answer]] = {
    **{name: Answer(said) for name, said in _SAID.items() if said not in _TELLING},
    0: Answer(Said.NOT_ON_DISK),
    1: Answer(Said.ON_DISK),
}


def _load_scripts() -> dict[str, str]:
    """Return the scripts, each with the texts that it includes. Those in the folder itself are parts too."""
    folder = importlib.resources.files(__package__).joinpath("scripts")
    texts = {
        file.name.removesuffix(".lua"): file.read_text()
        for room in (folder, folder.joinpath("membership"))
        for file in room.iterdir()
        if file.is_file()
    }
    return {
        name: re.sub(r"^-- include (\w+)\n", lambda found: texts[found[1]], text, flags=re.MULTILINE)
        for name, text in texts.items()
    }


SCRIPTS: Final = _load_scripts()
_DIGESTS: Final = {
    name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in SCRIPTS.items()
}


#: The script that does as several others do; see `merging.py`.
MERGED: Final = "merged"
_EVERYDAY: Final = ("acquire", "confirm", "release", "extend", MERGED)


class Unusable(Exception):  # noqa: N818 - it carries a node's answer, and is never seen by users
    """The node cannot be used; `answer` is what to report as its answer."""

    def __init__(self, said: Said, detail: str) -> None:
        super().__init__(detail)
        self.answer = Answer(said, detail=detail)


def broken(error: OSError) -> Unusable:
    """Return what to raise for a socket that cannot be written to or read from any more."""
    return Unusable(Said.UNREACHABLE, f"the connection broke: {error}")


#: What has been sent: something of the sender's, the command, and when.
Sent = tuple[Any, Command, float]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who answered on a socket when it was opened.

    Attributes:
        run_id: random id of the server process; a restart changes it.
        replid: its replication id, where every vote must prove it again; otherwise empty.
        node_id: the node's own id, given when it was initialised; empty while it is blank.
        membership: the list that it belongs to; None while it is blank.
        eviction: the policy by which it drops keys when its memory is full; empty if it drops none; None
            where it does not tell.
    """

    run_id: str
    replid: str
    node_id: str
    membership: Membership | None
    eviction: str | None = ""

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list.

        Raises:
            MembershipError: if the list cannot be read.
        """
        return replace(self, node_id=node_id, membership=Membership.from_json(members))


class Node:
    """Where a node is, and how to open a socket to it.

    Args:
        source: a URL (`redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `redis+cluster://`), or a
            client of redis-py, whose settings are kept.
        connect_timeout: seconds for connecting and for each answer while doing so.
        verify_votes: have every vote prove its server process, also where the socket would do.

    Attributes:
        name: the address, as a URL without its password.
        url_to_type: the same with a word where the password is to be typed.
        run_id: of the server that it was when a socket was opened last; empty before.

    Raises:
        ValueError: if the URL cannot be understood.
        TypeError: if it is neither a URL nor a client.
    """

    def __init__(self, source: Source, connect_timeout: float, *, verify_votes: bool) -> None:
        self._place: Place = place_of(source, connect_timeout)
        self._verify_votes = verify_votes or self._place.moves
        self.name = self._place.url()
        self.url_to_type = self._place.url(self._place.login)
        self.run_id = ""

    def open(self, node_key: str) -> Link:
        """Connect, and learn who is there.

        Raises:
            Unusable: with what to report as the node's answer.
        """
        lingering.sweep()
        failures: list[tuple[Server, Unusable]] = []
        tried: set[str] = set()
        try:
            for server in self._place.servers():
                if server.address in tried:
                    continue
                try:
                    return self._open(server, node_key, tried)
                except Unusable as error:
                    failures.append((server, error))
        except Nowhere as error:
            raise Unusable(Said.UNREACHABLE if error.passing else Said.ERROR, str(error)) from error
        if len(failures) == 1 and not self._place.moves:
            raise failures[0][1]
        raise _joined(failures)

    def _open(self, server: Server, node_key: str, tried: set[str]) -> Link:
        """Connect to a server; in a cluster, to the one where it says that the keys are.

        Several may name one that is gone: it is tried once.
        """
        while server.address not in tried:
            tried.add(server.address)
            connection = server.new_connection()
            try:
                connection.connect()
                info = _read_info(connection)
                identity = _identify(connection, info, node_key, verify_votes=self._verify_votes)
                _bring_scripts(connection)
                self._place.settle(server, _others(connection, info, server))
            except Unusable:
                connection.disconnect()
                raise
            except Exception as error:
                # Whatever a stranger on that port says, or a user's own connection class raises.
                connection.disconnect()
                moved = redirection(error)
                if moved is None:
                    raise _why(error) from error
                server = self._place.elsewhere(server, *moved)
            else:
                # From here on the socket is ours; the connection object must never touch it again.
                sock: socket.socket = connection._sock  # noqa: SLF001 - redis-py has no public name for it
                connection._sock = None  # noqa: SLF001
                self.run_id = identity.run_id
                return Link(sock, identity)
        raise Unusable(Said.UNREACHABLE, f"its cluster sends to {server.address}, which has been tried")


def _joined(failures: list[tuple[Server, Unusable]]) -> Unusable:
    """Return what to report where several servers were tried, or one that the user has not named."""
    passing = [error for _, error in failures if error.answer.said is not Said.ERROR]
    said = passing[0].answer.said if passing else Said.ERROR
    return Unusable(said, "; ".join(f"{server.address}: {error}" for server, error in failures))


def _why(error: Exception) -> Unusable:
    """Return what an error while connecting means for the use of the node."""
    if isinstance(error, MembershipError):
        return Unusable(Said.CONFIG, str(error))
    if isinstance(error, (RedisTimeoutError, TimeoutError)):
        return Unusable(Said.SILENT, "it took no connection in time")
    if isinstance(error, AuthenticationError):
        return Unusable(Said.ERROR, f"it refused the user or password: {error}")
    if isinstance(error, ResponseError):
        return _why_refused(error)
    if isinstance(error, InvalidResponse) or not isinstance(error, (RedisError, OSError)):
        return Unusable(Said.ERROR, f"it does not speak like a node: {error!r}")
    return Unusable(Said.UNREACHABLE, str(error))


def _why_refused(error: ResponseError) -> Unusable:
    """Return the same for an error that the server has answered."""
    if isinstance(error, ClusterDownError) or str(error).startswith("CLUSTERDOWN"):
        return Unusable(
            Said.UNREACHABLE, f"its cluster is down, as `redis-cli --cluster check` tells: {error}"
        )
    passing = isinstance(error, _PASSING_EXCEPTIONS) or str(error).startswith(_PASSING_ERRORS)
    return Unusable(Said.UNREACHABLE if passing else Said.ERROR, str(error))


def leads_elsewhere(answer: Answer) -> bool:
    """Whether an answer says that the node is served by another server now."""
    return answer.said in _LEADING and any(word in answer.detail for word in _ELSEWHERE)


def _read_info(connection: Any) -> dict[str, str]:
    connection.send_command("INFO")
    info = dict(
        line.split(":", 1)
        for line in connection.read_response().decode(errors="replace").splitlines()
        if ":" in line
    )
    if "sentinel" in {info.get("redis_mode"), info.get("server_mode")}:
        raise Unusable(
            Said.ERROR,
            "it is a sentinel: write redis+sentinel://host1:26379,host2:26379/SERVICE with all of them",
        )
    return info


def _identify(connection: Any, info: dict[str, str], node_key: str, *, verify_votes: bool) -> Identity:
    # Before its role matters: a replica in a cluster says where its primary is.
    connection.send_command("HMGET", node_key, "id", "members")
    node_id, members = connection.read_response()
    if info.get("role") not in {"master", None}:
        # Who was sent here by a sentinel has come in the midst of a failover.
        raise Unusable(
            Said.UNREACHABLE if verify_votes else Said.ERROR,
            f"it is a {info['role']}, and only primaries grant locks: name the primary, or the sentinels "
            "that know it, redis+sentinel://host1:26379,host2:26379/SERVICE",
        )
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
    blank = Identity(info["run_id"], replid, "", None, eviction_of(info))
    return blank.admitted(node_id.decode(), members.decode()) if members else blank


def eviction_of(info: Mapping[str, str]) -> str | None:
    """Return what a server's INFO tells of eviction, as `Identity` has it."""
    limit, policy = info.get("maxmemory", ""), info.get("maxmemory_policy", "")
    if limit == "0" or policy == "noeviction":
        return ""
    return policy if limit and policy else None


def _others(connection: Any, info: dict[str, str], server: Server) -> list[tuple[str, int]]:
    """Return the servers of a cluster, any of which can be asked when this one is gone."""
    if info.get("cluster_enabled", "0") == "0":
        return []
    try:
        connection.send_command("CLUSTER", "SLOTS")
        return members_of_cluster(server, connection.read_response())
    except ResponseError:
        return []  # this user may not: then those that were named have to do


def _bring_scripts(connection: Any) -> None:
    """Give a node the everyday scripts that it does not know.

    Otherwise the first ACQUIRE is answered with NOSCRIPT; where a majority has granted before that is read,
    the node would have no lock, for as long as nobody reads.
    """
    try:
        connection.send_command("SCRIPT EXISTS", *(_DIGESTS[name] for name in _EVERYDAY))
        for name, known in zip(_EVERYDAY, connection.read_response(), strict=True):
            if not known:
                connection.send_command("SCRIPT LOAD", SCRIPTS[name])
                connection.read_response()
    except ResponseError:
        return  # this user may not: then each is brought along when it is first called


def pack(command: Command) -> bytes:
    """Return the part of a command that is the same for every node; the socket appends its own."""
    if command.script == SYNC.script:
        return b"*%d\r\n%b" % (1 + len(command.arguments), _pack_words(("WAITAOF", *command.arguments)))
    return _pack(command, "EVALSHA", _DIGESTS[command.script])


def _pack(command: Command, verb: str, script: str) -> bytes:
    keys, arguments = command.keys, command.arguments
    pack_head = _pack_head_again if verb == "EVALSHA" and len(keys) == _KEYS_OF_ONE else _pack_head
    count = 3 + len(keys) + len(arguments) + _OWN_ARGUMENTS
    return b"*%d\r\n%b%b" % (count, pack_head(verb, script, keys), _pack_words(arguments))


def _pack_head(verb: str, script: str, keys: tuple[str, ...]) -> bytes:
    """Return what every call of a script with the same keys has in common."""
    return _pack_words((verb, script, len(keys), *keys))


#: Mostly a few resources are locked over and over.
_pack_head_again = functools.lru_cache(1024)(_pack_head)


def _pack_words(words: tuple[str | int, ...]) -> bytes:
    """Return the words of a command without the line that counts them.

    hiredis is handed text only. It turns an int into text itself, and Python runs signal handlers there: the
    interpreter crashes when one raises.
    """
    texts = tuple([word if type(word) is str else str(word) for word in words])
    # The stub of hiredis knows tuples of one word only.
    packed: bytes = hiredis.pack_command(texts)  # type: ignore[arg-type]
    return packed[packed.index(b"\n") + 1 :]


def read_answer(reply: Any) -> Answer:
    """Return what a node's reply to a script means."""
    if type(reply) is list:
        word = reply[0]
        if word == b"GRANTED":  # first, for most are that or bare
            return Answer(_GRANTED, reply[1], tuple(reply[2:]))
        if (bare := _BARE.get(word)) is not None:
            return bare
    elif isinstance(reply, hiredis.ReplyError):
        text = str(reply)
        # Before version 7, an error in a script is quoted in another one.
        reason = text.rpartition(": -")[2] if text.startswith("ERR Error running script") else text
        return Answer(Said.UNREACHABLE if reason.startswith(_PASSING_ERRORS) else Said.ERROR, detail=reason)
    word = reply[0]
    said = _SAID[word]
    if said in _WITH_TTL:
        # A lock without an end was put there by somebody else than a client of ours.
        return Answer(said, ttl=reply[1] / 1000 if reply[1] >= 0 else math.inf)
    if said in _WITH_FACTS:
        return Answer(said, facts=tuple(part.decode() for part in reply[1:]))
    return Answer(said, reply[1], tuple(reply[2:]))


def read_whole(data: bytes) -> Answer | None:
    """Return the answer that data are, if they are one, and nothing but that one."""
    reader = hiredis.Reader()
    try:
        reader.feed(data)
        reply = reader.gets()
        if type(reply) is list and not reader.has_data():
            return read_answer(reply)
    except (hiredis.HiredisError, LookupError, TypeError, ValueError):
        pass
    return None


class Link:
    """An open socket to one node: written and read without waiting, answers in the order of the requests.

    Where a write or a read is interrupted by an exception from outside, such as a signal handler's, the
    link must not be used again: answers could no longer be told apart.

    Attributes:
        identity: who answered when the socket was opened.
        descriptor: the socket's, for polling.
        waiting: what has been sent and not been answered: to be looked at.
        unsent: what has been put here and not been written yet.
        leads_elsewhere: whether an answer has said that another server has taken over.
        recv: reads from the socket itself.
        whole: whether what `recv` returns next begins with an answer's first byte. False also where that
            cannot be told.
        spoilt: whether something was interrupted, so that answers might be taken for others.
        merges: whether merged commands are of any use: not where every vote must prove its server, and not
            for a user who may not execute them.
    """

    __slots__ = (
        "_own_arguments",
        "_pending",
        "_reader",
        "_releases",
        "_releasing",
        "_sock",
        "descriptor",
        "identity",
        "leads_elsewhere",
        "merges",
        "recv",
        "spoilt",
        "unsent",
        "waiting",
        "whole",
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
        self.waiting: deque[Sent] = deque()
        #: Of these, how many are RELEASEs of a nonce; and merged commands that release some, in their order.
        self._releases: dict[str, int] = {}
        self._releasing: deque[Any] = deque()
        self.unsent: list[bytes] = []
        self.leads_elsewhere = False
        self.recv = sock.recv
        self.whole = self._pending is None
        self.merges = not identity.replid
        self.spoilt = False

    def close(self) -> None:
        """Close the socket. In a forked child this leaves the parent's alone."""
        self._sock.close()

    def hang_up(self) -> None:
        """End the connection; what the node has been sent it still executes, if it lives."""
        if self.waiting:
            lingering.close_when_read(self._sock)
        else:
            self._sock.close()

    def put(self, sent: Sent, packed: bytes) -> None:
        """Take a command, whose common part has been packed, for the next `flush`."""
        spoilt, self.spoilt = self.spoilt, True
        self._await(sent)
        # All scripts have a key.
        self.unsent.append(packed + self._own_arguments if sent[1].keys else packed)
        self.spoilt = spoilt  # where an earlier one was interrupted, it stays so

    def unanswered(self) -> Iterator[tuple[Any, Command]]:
        """Yield what has been sent and not been answered, with its sender; of what was merged, each part."""
        for sender, command, _ in self.waiting:
            if command.script == MERGED:
                for ballot, request in sender.parts:
                    yield ballot, request.command
            else:
                yield sender, command

    def releases(self, nonce: str) -> bool:
        """Whether a RELEASE of that nonce is under way."""
        return nonce in self._releases or any(nonce in batch.releasing for batch in self._releasing)

    def _await(self, sent: Sent) -> None:
        """Count on an answer."""
        self.waiting.append(sent)
        command = sent[1]
        if command.script == "release":
            self._releases[command.nonce] = self._releases.get(command.nonce, 0) + 1
        elif command.script == MERGED and sent[0] is not None and sent[0].releasing:
            self._releasing.append(sent[0])

    def answered(self) -> Sent:
        """Return what the next answer is to, which is awaited no more."""
        sent = self.waiting.popleft()
        command = sent[1]
        if command.script == "release":
            if (left := self._releases.pop(command.nonce) - 1) > 0:
                self._releases[command.nonce] = left
        elif self._releasing and self._releasing[0] is sent[0]:
            self._releasing.popleft()
        return sent

    def flush(self) -> bool:
        """Write what has been put here, as far as the socket takes it; return whether that was all.

        Raises:
            Unusable: if the connection is broken.
        """
        self._check_sound()
        data = self.unsent[0] if len(self.unsent) == 1 else b"".join(self.unsent)
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        except OSError as error:
            raise broken(error) from error
        complete = sent == len(data)
        self.unsent = [] if complete else [data[sent:]]
        return complete

    def _check_sound(self) -> None:
        if self.spoilt:
            raise Unusable(Said.UNREACHABLE, "writing to it was interrupted")

    def send(self, sent: Sent, packed: bytes) -> None:
        """Send a command at once, where nothing is left to be written before it.

        Raises:
            Unusable: if the connection is broken or its buffer is full.
        """
        self._await(sent)
        data = packed + self._own_arguments if sent[1].keys else packed
        try:
            complete = self._sock.send(data) == len(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            complete = False
        except OSError as error:
            raise broken(error) from error
        if not complete:
            raise Unusable(Said.SILENT, "it reads nothing any more")

    def receive(self, now: float, read: bytes = b"") -> Iterator[tuple[Sent, Answer]]:
        """Yield the answers that have arrived, with what they answer, which is `waiting` until then.

        Commands whose script the node did not know are put here again, with its text, for a `flush`.

        Args:
            now: the time.
            read: what `recv` has returned already, if it has.

        Raises:
            Unusable: if the connection is broken, or what answers is no node.
        """
        self._check_sound()
        data = read or self._read()
        if data is None:
            return
        reader, waiting = self._reader, self.waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                sent = self.answered()
                if type(reply) is list or not str(reply).startswith("NOSCRIPT"):
                    answer = read_answer(reply)
                else:
                    # On the same socket, or who knows which server process would answer.
                    sender, command, _ = sent
                    self.put((sender, command, now), _pack(command, "EVAL", SCRIPTS[command.script]))
                    continue
                yield sent, answer
        except (hiredis.HiredisError, LookupError, TypeError, ValueError) as error:
            raise Unusable(Said.ERROR, f"it does not speak like a node: {error!r}") from error
        self.whole = not waiting and self._pending is None

    def subscribe(self, channel: str) -> None:
        """Listen to a channel; from now on the link is good for `messages` only.

        Raises:
            Unusable: if the connection is broken.
        """
        try:
            self._sock.send(hiredis.pack_command(("SUBSCRIBE", channel)))  # type: ignore[arg-type]
        except OSError as error:
            raise broken(error) from error

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
            raise broken(error) from error
        if not data:
            raise Unusable(Said.UNREACHABLE, "the connection broke: closed by the node")
        return data
