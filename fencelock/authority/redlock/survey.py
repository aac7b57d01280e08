"""What each node says about itself, and how to ask all of them: for recovery, change of nodes and status.

Everything here may be asked by anybody at any time; nothing changes by it.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fencelock.authority.redlock.protocol.messages import (
    PASSING,
    SYNC,
    Answer,
    Answers,
    Broadcast,
    Command,
    Request,
    Round,
    Said,
    Sleep,
)

_PAUSE = 0.02


class NodeState(enum.Enum):
    """What a node is good for at the moment."""

    ADMITTED = "admitted"
    RECOVERING = "recovering"
    BLANK = "blank"
    RESTARTED = "restarted"
    UNREACHABLE = "unreachable"
    OTHER_MEMBERSHIP = "other membership"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node, as `Redlock.status()` and `fencelock nodes` tell of it.

    Attributes:
        address: without password.
        state: admitted nodes vote; the others do not, or not in this list.
        epoch: in which it votes, or voted last; None where it has forgotten.
        recovering_for: seconds until it can be admitted again, at the earliest; None unless recovering.
        detail: what a person should read; may be empty.
    """

    address: str
    state: NodeState
    epoch: int | None = None
    recovering_for: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """All that a node says about itself at one moment.

    Attributes:
        admitted: it has its marker, and has not restarted since it was admitted.
        epoch: in which it votes; None for a node without a marker.
        promised: the highest epoch that it has promised.
        fingerprint: of the list that it belongs to; empty without a marker, as the next two.
        node_id: its own id.
        members: the list, as text.
        next_fingerprint: of the list that it is closed for; empty where it is open.
        next_members: that list, as text.
        ticket: under which it can be admitted; empty where it has none.
        ticket_left: seconds for which it still stays out, by its own clock, where it has a ticket.
    """

    admitted: bool
    epoch: int | None
    promised: int
    fingerprint: str
    node_id: str
    members: str
    next_fingerprint: str
    next_members: str
    ticket: str
    ticket_left: float

    @classmethod
    def of(cls, answer: Answer) -> Standing:
        """Read the answer to READ."""
        admitted, epoch, promised, cfg, node_id, members, following, next_members, ticket, left = answer.facts
        return cls(
            admitted=bool(admitted),
            epoch=int(epoch) if epoch else None,
            promised=int(promised or 0),
            fingerprint=cfg,
            node_id=node_id,
            members=members,
            next_fingerprint=following,
            next_members=next_members,
            ticket=ticket,
            ticket_left=int(left or 0) / 1000,
        )

    @property
    def blank(self) -> bool:
        """Whether it holds no marker."""
        return self.epoch is None

    @property
    def closed(self) -> bool:
        """Whether its list has given way to another."""
        return bool(self.next_fingerprint)

    @property
    def highest(self) -> int:
        """The highest epoch that it knows of."""
        return max(self.epoch or 0, self.promised)

    def held_for(self, seat: str) -> str:
        """Return the id that it holds; for a blank node, that of the seat which it is to get back."""
        return seat if self.blank else self.node_id

    def votes_in(self, fingerprint: str) -> bool:
        """Whether it votes in the list of that fingerprint."""
        return self.admitted and not self.closed and self.fingerprint == fingerprint

    def still_promises(self, epoch: int, before: Standing) -> bool:
        """Whether a node that has promised an epoch has not forgotten it since `before` that.

        One that has been admitted again meanwhile is in a later epoch than it was.
        """
        return self.promised >= epoch and self.epoch == before.epoch


Standings = dict[int, Standing]


def ask(command: Command, nodes: Iterable[int], patience: float) -> Generator[Request, Any, Answers]:
    """Send a command to nodes, and again to those that cannot be reached, until patience is over.

    The drivers wait only for the connections of a majority; here every node counts. The command must do
    no harm when it arrives twice.
    """
    answers: dict[int, Answer] = {}
    missing = list(nodes)
    deadline: float | None = None
    while missing:
        done: Round = yield Broadcast(command, missing, _all(missing), patience)
        answers.update(done.answers)
        deadline = done.began + patience if deadline is None else deadline
        missing = [node for node in missing if answers[node].said in PASSING]
        if done.ended >= deadline:
            break
        if missing:
            yield Sleep(_PAUSE)
    return answers


def _all(nodes: Sequence[int]) -> Any:
    return lambda answers: len(answers) == len(nodes)


def read(
    node_key: str, nodes: Iterable[int], patience: float
) -> Generator[Request, Any, tuple[Standings, Answers]]:
    """Ask nodes where they stand; return that of those that answer, and everybody's answers."""
    answers = yield from ask(Command("read", "", (node_key,), ("",)), nodes, patience)
    told = {node: Standing.of(answer) for node, answer in answers.items() if answer.said is Said.STANDING}
    return told, answers


def synced(nodes: Iterable[int], patience: float) -> Generator[Request, Any, set[int]]:
    """Wait until nodes have on their disks what they were told last; return those that are still there.

    This is what lets a power failure pass that hits all nodes at once: what a majority has promised must not
    be forgotten by all of them together. Servers before 7.2 cannot be waited for; with `appendfsync always`
    they have written everything before they answer, otherwise such a failure may cost them a second, and
    a node without an append-only file comes back blank in any case. None of this matters while fewer than
    a majority forget at a time, so a node that cannot say is not held back.
    """
    asked = list(nodes)
    if not asked:
        return set()
    done: Round = yield Broadcast(SYNC, asked, _all(asked), SYNC_SECONDS + patience)
    return {node for node, answer in done.answers.items() if answer.said not in PASSING}


SYNC_SECONDS = int(SYNC.arguments[-1]) / 1000


def nodes_saying(answers: Answers, said: Said) -> set[int]:
    """Return the nodes that have said that."""
    return {node for node, answer in answers.items() if answer.said is said}
