"""Commands as bytes, and replies as answers: RESP, by hiredis.

Everyday commands are calls of scripts by their digest. Each ends with two arguments of the connection that
sends it: the server process that the connection was opened to, and its replication id.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import re
from collections.abc import Sequence
from importlib.resources.abc import Traversable
from typing import Any, Final

import hiredis

from fencelock.authority.redlock.protocol.messages import (
    GRANTED,
    INTRODUCE,
    MISSING_RIGHT,
    SUBSCRIBE,
    SYNC,
    Command,
    Reply,
    ReplyKind,
)
from fencelock.errors import PAGES

#: First words of error replies that pass with time, or on a new connection.
PASSING_ERRORS: Final = (
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
#: Words in error replies of a server that does not serve the keys any more, because another server does.
_ELSEWHERE: Final = ("MOVED", "ASK ", "READONLY")
_SAID: Final = {said.name.encode(): said for said in ReplyKind}
_OWN_ARGUMENTS: Final = 2
_LEADING: Final = frozenset({ReplyKind.UNREACHABLE, ReplyKind.ERROR})
_WITH_FACTS: Final = frozenset(
    {
        ReplyKind.TICKET,
        ReplyKind.ADMITTED,
        ReplyKind.OPENED,
        ReplyKind.STANDING,
        ReplyKind.LEASES,
        ReplyKind.CLEARED,
        ReplyKind.SHOWN,
    }
)
_WITH_TTL: Final = frozenset({ReplyKind.HELD, ReplyKind.RESTARTED, ReplyKind.EARLY})
_WITH_COUNTERS: Final = frozenset({ReplyKind.EXTENDED, ReplyKind.GRANTED, ReplyKind.HIGHER})
#: Answers that are complete with their first word. The answer of WAITAOF is a number of disks.
_STATUS_ONLY: Final[dict[bytes | int, Reply]] = {
    **{
        name: Reply(said)
        for name, said in _SAID.items()
        if said not in _WITH_FACTS | _WITH_TTL | _WITH_COUNTERS
    },
    0: Reply(ReplyKind.NOT_ON_DISK),
    1: Reply(ReplyKind.ON_DISK),
}


def _load_scripts() -> dict[str, str]:
    """Return the scripts by name, each with the texts that it begins with and those that it includes."""
    folder = importlib.resources.files("fencelock.authority.redlock").joinpath("scripts")

    def texts(room: Traversable) -> dict[str, str]:
        return {file.name.removesuffix(".lua"): file.read_text() for file in room.iterdir() if file.is_file()}

    parts, members = texts(folder), texts(folder.joinpath("membership"))
    scripts = {name: parts["prelude"] + parts[name] for name in (*PRELOADED, "inspect")}
    head = parts["prelude"] + parts["marker"] + parts["membership"]
    scripts |= {name: head + text for name, text in members.items()}
    include = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
    return {name: include.sub(lambda found: parts[found[1]], text) for name, text in scripts.items()}


PRELOADED: Final = ("acquire", "confirm", "release", "extend", "batch")
SCRIPTS: Final = _load_scripts()
DIGESTS: Final = {
    name: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in SCRIPTS.items()
}
#: Commands that are no scripts.
_WORDS: Final = {SYNC.script: "WAITAOF", SUBSCRIBE: "SUBSCRIBE", INTRODUCE: "SET"}

#: Match errors of a server that lacks a command, or whose user lacks the right to it. If a script has called
#: the command, only newer servers name it. Others name the script and the line.
_UNKNOWN: Final = re.compile(r"(?i)unknown (?:redis )?command called from")
_FORBIDDEN: Final = re.compile(r"(?i)(?:no permissions to run|can't run this command)")
_PLACE: Final = re.compile(r"([0-9a-f]{40}).*@user_script: ?(\d+)", re.DOTALL)
_CALL: Final = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")

#: How many arguments an ACQUIRE and a RELEASE of one lock have, without a place in line.
_SIMPLE: Final = {"acquire": 6, "release": 5}


class Packed:
    """A command as bytes, the same for every node; made when they are first needed."""

    __slots__ = ("_alone", "_part", "command", "fingerprint", "is_simple")

    def __init__(self, command: Command, alone: bytes | None = None) -> None:
        self.command: Command = command
        script, _, _, arguments = command
        # The last argument of an ACQUIRE is a hint, which a batch cannot have.
        #: Whether it may be a part of a batch.
        self.is_simple: bool = len(arguments) == _SIMPLE.get(script) and (
            script == "release" or not arguments[-1]
        )
        #: Its membership's fingerprint, the same for all parts of a batch; empty if it is no part.
        self.fingerprint: str | int = arguments[0] if self.is_simple else ""
        self._alone = alone
        self._part: tuple[bytes, bytes] | None = None

    @property
    def alone(self) -> bytes:
        if self._alone is None:
            self._alone = pack(self.command)
        return self._alone

    @property
    def part(self) -> tuple[bytes, bytes]:
        """Its lock, and its other words, packed for a batch."""
        if self._part is None:
            script, nonce, (_, lock), arguments = self.command
            if script == "acquire":
                _, _, ttl, _, stripe, _ = arguments
                words = pack_words(nonce, stripe, ttl, "")
            else:
                _, _, _, stripe, counter = arguments
                words = pack_words(nonce, stripe, "", counter)
            self._part = pack_words(lock), words
        return self._part


def pack_batch(batch: Sequence[Packed]) -> bytes:
    keys, words = zip(*[each.part for each in batch], strict=True)
    head = pack_words("EVALSHA", DIGESTS["batch"], 1 + len(batch), batch[0].command.keys[0])
    count = 5 + 5 * len(batch) + _OWN_ARGUMENTS
    return b"".join([b"*%d\r\n" % count, head, *keys, pack_words(batch[0].fingerprint), *words])


def pack(command: Command, text: str = "") -> bytes:
    """Return the bytes of a command that are the same for every node; `text` replaces a script's digest."""
    name, _, keys, arguments = command
    if (word := _WORDS.get(name)) is not None:
        return b"*%d\r\n%b" % (1 + len(arguments), pack_words(word, *arguments))
    call = ("EVAL", text) if text else ("EVALSHA", DIGESTS[name])
    count = 3 + len(keys) + len(arguments) + _OWN_ARGUMENTS
    return b"*%d\r\n%b" % (count, pack_words(*call, len(keys), *keys, *arguments))


def pack_words(*words: str | int) -> bytes:
    """Return the words of a command without the line that counts them."""
    # hiredis gets text only. If it turns an int into text, Python runs signal handlers there, and the
    # interpreter crashes when one raises.
    texts = tuple([word if type(word) is str else str(word) for word in words])
    # The stub of hiredis knows tuples of one word only.
    packed: bytes = hiredis.pack_command(texts)  # type: ignore[arg-type]
    return packed[packed.index(b"\n") + 1 :]


def read_reply(reply: Any) -> Reply | None:
    """Return the answer in a reply of any kind; None if the node does not know the script."""
    if reply == b"OK":  # to SET
        return Reply(ReplyKind.NOTED)
    if isinstance(reply, hiredis.PushNotification):  # the only reply to SUBSCRIBE
        return Reply(ReplyKind.SUBSCRIBED)
    return None if str(reply).startswith("NOSCRIPT") else read_answer(reply)


def read_answer(reply: Any) -> Reply:
    if isinstance(reply, hiredis.ReplyError):
        text = str(reply)
        # Before Redis 7, an error in a script is quoted in another error.
        reason = text.rpartition(": -")[2] if text.startswith("ERR Error running script") else text
        if reason.startswith(PASSING_ERRORS):
            return Reply(ReplyKind.UNREACHABLE, detail=reason)
        return Reply(ReplyKind.ERROR, detail=_what_is_missing(text) or reason)
    word = reply[0]
    said = GRANTED
    if word != b"GRANTED":  # most answers are GRANTED, or one word
        if (bare := _STATUS_ONLY.get(word)) is not None:
            return bare
        said = _SAID[word]
        if said in _WITH_TTL:
            # A lock without an expiry was not made by fencelock.
            return Reply(said, ttl=reply[1] / 1000 if reply[1] >= 0 else math.inf)
        if said in _WITH_FACTS:
            return Reply(said, facts=tuple(part.decode(errors="backslashreplace") for part in reply[1:]))
    if type(sum(reply[1:])) is not int:  # for most other types, sum raises a TypeError itself
        raise ValueError(f"{reply} has no counters of an epoch")
    return Reply(said, reply[1], tuple(reply[2:]))


def _what_is_missing(text: str) -> str:
    """Return a text about the command that a server or its user lacks; an empty text for other errors."""
    is_unknown = _UNKNOWN.search(text) is not None
    place = _PLACE.search(text)
    if place is None or not (is_unknown or _FORBIDDEN.search(text)):
        return ""
    name = next((name for name, digest in DIGESTS.items() if digest == place[1]), "")
    lines = SCRIPTS.get(name, "").splitlines()
    call = _CALL.search(lines[int(place[2]) - 1]) if int(place[2]) <= len(lines) else None
    if call is None:
        return ""
    words = [word for word in call.groups() if word]
    if is_unknown:
        return f"the server lacks the command {' '.join(words)}, which fencelock needs ({PAGES}/redis/)"
    return f"its user lacks the right +{'|'.join(words).lower()} ({MISSING_RIGHT})"


def leads_elsewhere(answer: Reply) -> bool:
    """Return whether an answer says that another server serves the node now."""
    return answer.kind in _LEADING and any(word in answer.detail for word in _ELSEWHERE)
