"""Many tasks' commands in one call of a script: all that is asked in one tick of a loop.

Most of what a node spends on an ACQUIRE or a RELEASE goes to receiving and beginning it, and to reading its
own marker; most of what a client spends goes to telling the answers of many nodes apart. So everyday commands
about different locks are merged: a node executes them one after the other, and where a majority says the very
same of all of them, they are told together.

Nothing is decided here. A node that finds anything out of the ordinary with a lock leaves it as it is, and
then that command is sent again by itself. What a merged command leaves behind is what its parts, sent one
after the other, could have left as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fencelock.authority.redlock.node import MERGED
from fencelock.authority.redlock.protocol import Answer, Broadcast, Command, Said
from fencelock.authority.redlock.seats import Ballot

#: Locks in one call; with so many it is sent at once. A node does nothing else meanwhile: for a quarter of a
#: millisecond. And while nodes work at the locks of some tasks, the client does for others.
MOST: Final = 50

#: How many arguments ACQUIRE and RELEASE of one lock have, where nobody waits in line or mints anew.
_OF_ACQUIRE, _OF_RELEASE = 6, 5
_NODE_AND_LOCK = 2
_RELEASED: Final = Answer(Said.RELEASED)

#: A request, and what waits for its answers.
Part = tuple[Ballot, Broadcast]


def may_be_merged(request: Broadcast, nodes: int) -> bool:
    """Whether a request is an everyday one: to all nodes, about one lock, with no hint or place in line."""
    script, _, keys, arguments = request.command
    if len(keys) != _NODE_AND_LOCK or len(request.nodes) != nodes:
        return False
    if script == "acquire":
        return len(arguments) == _OF_ACQUIRE and arguments[5] == 0
    return script == "release" and len(arguments) == _OF_RELEASE


class Gathering:
    """Requests of one tick that can be sent in one call, in their order.

    Attributes:
        parts: the requests.
        releasing: the nonces that they release.
        full: whether it takes no more, and is to be sent at once.
    """

    __slots__ = ("_fingerprint", "_keys", "full", "parts", "releasing")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.releasing: set[str] = set()
        self.full = False
        self._keys: set[str] = set()
        self._fingerprint: str | int = ""

    def add(self, ballot: Ballot, request: Broadcast) -> bool:
        """Take a request that may be merged; return False where it does not go with those before it."""
        script, nonce, (_, key), arguments = request.command
        if not self.parts:
            self._fingerprint = arguments[0]
        elif self.full or key in self._keys or arguments[0] != self._fingerprint:
            return False
        if script == "release":
            self.releasing.add(nonce)
        self._keys.add(key)
        self.parts.append((ballot, request))
        self.full = len(self.parts) >= MOST
        return True

    def command(self) -> Command:
        """Return the command that does as all of them do."""
        keys, arguments = [self.parts[0][1].command.keys[0]], [self._fingerprint, ""]
        for _, request in self.parts:
            script, nonce, (_, key), own = request.command
            keys.append(key)
            arguments += (nonce, own[2], own[4]) if script == "acquire" else (nonce, f"-{own[4]}", own[3])
        return Command(MERGED, "", tuple(keys), tuple(arguments))


class Batch:
    """A merged command that has been sent; as a ballot, it hears what nodes say of it, and tells its parts.

    As long as nodes say the very same, and less than a majority has, that is held back: it could not complete
    any of the parts.

    Args:
        gathering: the requests.
        asked: how many nodes have been sent it.
        quorum: how many nodes are a majority.
        on_late: called with a node and commands that it has executed for nobody who would still wait.
        on_single: called with a node, parts that have to be sent to it singly, and what it said instead.

    Attributes:
        over: whether nobody waits any more; always false, for the parts have to hear in any case.
        holds: whether something may be held back.
        parts: the requests.
        releasing: the nonces that they release.
    """

    __slots__ = (
        "_alike",
        "_held",
        "_on_late",
        "_on_single",
        "_quorum",
        "_singles",
        "holds",
        "parts",
        "releasing",
    )

    over = False

    def __init__(
        self,
        gathering: Gathering,
        asked: int,
        quorum: int,
        on_late: Callable[[int, Sequence[Command]], None],
        on_single: Callable[[int, Sequence[Part], Answer], None],
    ) -> None:
        self.parts = gathering.parts
        self.releasing = gathering.releasing
        self.holds = 0 < quorum <= asked
        self._quorum = quorum
        self._on_late = on_late
        self._on_single = on_single
        self._held: list[int] = []
        self._alike: Answer | None = None
        self._singles: list[Answer] = []

    def hear(self, node: int, answer: Answer) -> None:
        """Note a node's answer, or why there is none."""
        if not self.holds:
            self._tell(node, answer)
        elif answer == self._alike or (
            self._alike is None and answer.said is Said.MERGED and 0 not in answer.counters
        ):
            self._alike = answer
            self._held.append(node)
            if len(self._held) == self._quorum:
                self.tell_held()
        else:
            self.tell_held()
            self._tell(node, answer)

    def tell_held(self) -> None:
        """Tell the parts what is held back, and everything else as it comes."""
        self.holds = False
        nodes, self._held = self._held, []
        if self._alike is None or not nodes:
            return
        late = []
        for (ballot, request), answer in zip(self.parts, self._singly(self._alike), strict=True):
            if not ballot.over:
                ballot.hear_alike(nodes, answer)
            elif answer.said is Said.GRANTED:
                late.append(request.command)
        if late:
            for node in nodes:
                self._on_late(node, late)

    def _tell(self, node: int, answer: Answer) -> None:
        if answer.said is not Said.MERGED:
            self._on_single(node, self.parts, answer)
            return
        late, undone = [], []
        for part, single in zip(self.parts, self._singly(answer), strict=True):
            ballot, request = part
            if single.said is Said.SINGLY:
                undone.append(part)
            elif not ballot.over:
                ballot.hear(node, single)
            elif single.said is Said.GRANTED:
                late.append(request.command)
        if late:
            self._on_late(node, late)
        if undone:
            self._on_single(node, undone, answer)

    def _singly(self, answer: Answer) -> list[Answer]:
        """Return what a node says of each part; what the same answer means is found out once."""
        if answer is not self._alike and answer == self._alike:
            answer = self._alike
        if answer is self._alike and self._singles:
            return self._singles
        epoch = answer.epoch
        singles = [
            _NOT_DONE
            if not code
            else Answer(Said.GRANTED, epoch, (code,))
            if request.command.script == "acquire"
            else _RELEASED
            for (_, request), code in zip(self.parts, answer.counters, strict=True)
        ]
        if answer is self._alike:
            self._singles = singles
        return singles


_NOT_DONE: Final = Answer(Said.SINGLY)
