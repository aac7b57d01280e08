"""The reports of nodes about themselves, and the commands to get them.

A `NodeGroup` sends commands to its nodes; `read` asks for their state and changes nothing. A `Census` sums up
the reports: the list that most nodes belong to, and the state of its members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fencelock.authority.redlock.membership.members import Membership
from fencelock.authority.redlock.protocol.messages import (
    PASSING,
    SYNC,
    Broadcast,
    Command,
    NodeReplies,
    Replies,
    Reply,
    ReplyKind,
    Sleep,
    Steps,
)

SYNC_SECONDS = int(SYNC.arguments[-1]) / 1000
_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The report of a node about itself at one moment; fields that a blank node does not have are empty."""

    node_id: str
    members: str
    admitted: bool  # whether it was admitted, and has neither restarted nor loaded other data since
    epoch: int | None  # the epoch in which it votes, or voted last; None if it is blank
    promised: int
    fingerprint: str
    next_fingerprint: str  # fingerprint of the list for which it is closed
    next_members: str
    ticket: str  # the ticket by which it can be admitted
    ticket_left: float  # seconds for which it still stays out, by its own clock, if it has a ticket

    @classmethod
    def of(cls, answer: Reply) -> NodeReport:
        node_id, members, admitted, epoch, promised, cfg, following, next_members, ticket, left = answer.facts
        epochs = int(epoch) if epoch else None, int(promised or 0)
        lists = cfg, following, next_members
        return cls(node_id, members, bool(admitted), *epochs, *lists, ticket, int(left or 0) / 1000)

    @property
    def blank(self) -> bool:
        return self.epoch is None

    @property
    def closed(self) -> bool:
        return bool(self.next_fingerprint)

    @property
    def highest(self) -> int:
        return max(self.epoch or 0, self.promised)

    def votes_in(self, fingerprint: str) -> bool:
        return self.admitted and not self.closed and self.fingerprint == fingerprint

    def still_promises(self, epoch: int, before: NodeReport) -> bool:
        """Return whether the node still promises an epoch, and nothing else has changed since `before`."""
        unchanged = replace(self, promised=before.promised, ticket_left=before.ticket_left) == before
        return self.promised >= epoch and unchanged


Reports = dict[int, NodeReport]


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes that a procedure asks, and its settings."""

    names: tuple[str, ...]
    node_key: str
    patience: float  # seconds to wait for a node
    new_word: Callable[[], str]  # makes a random word, for tickets
    jitter: Callable[[], float]  # returns a random number between 0 and 1

    def ask(self, script: str, nodes: Iterable[int], *arguments: str | int) -> Steps[dict[int, Reply]]:
        """Send a command to nodes, and again to those that do not answer, until patience is over.

        It repeats, because a command is sent as soon as a majority is connected, and every node counts here.
        The command must do no harm if it arrives twice.
        """
        command = Command(script, "", (self.node_key,), arguments)
        answers: dict[int, Reply] = {}
        missing = list(nodes)
        deadline: float | None = None
        while missing:
            done: Replies = yield _to_all(command, missing, self.patience)
            answers.update(done.answers)
            deadline = done.began + self.patience if deadline is None else deadline
            missing = [node for node in missing if answers[node].kind in PASSING]
            if done.ended >= deadline:
                break
            if missing:
                yield Sleep(_PAUSE)
        return answers

    def ask_each(
        self, script: str, arguments: Mapping[int, tuple[str | int, ...]]
    ) -> Steps[dict[int, Reply]]:
        """Send a command with arguments for each node; nodes with the same arguments are asked together."""
        answers: dict[int, Reply] = {}
        for same in dict.fromkeys(arguments.values()):
            nodes = [node for node, own in arguments.items() if own == same]
            answers |= yield from self.ask(script, nodes, *same)
        return answers

    def read(self, nodes: Iterable[int] | None = None) -> Steps[tuple[Reports, dict[int, Reply]]]:
        """Ask nodes, by default all, for their reports; return the reports, and the answers of all."""
        answers = yield from self.ask("read", range(len(self.names)) if nodes is None else nodes, "")
        return {node: NodeReport.of(answers[node]) for node in saying(answers, ReplyKind.STANDING)}, answers

    def synced(self, nodes: Iterable[int]) -> Steps[set[int]]:
        """Wait until nodes have the latest changes on their disks; return the nodes that still answer.

        This prevents one power failure from making a whole majority forget its promise. A node without a disk
        counts, too: if fewer than a majority forget at a time, disks do not matter.
        """
        asked = list(nodes)
        if not asked:
            return set()
        done: Replies = yield _to_all(SYNC, asked, SYNC_SECONDS + self.patience)
        return {node for node, answer in done.answers.items() if answer.kind not in PASSING}


def _to_all(command: Command, nodes: list[int], patience: float) -> Broadcast:
    return Broadcast(command, nodes, lambda answers: len(answers) == len(nodes), patience)


def saying(answers: NodeReplies, *said: ReplyKind) -> list[int]:
    return [node for node, answer in answers.items() if answer.kind in said]


@dataclass(frozen=True, slots=True)
class Census:
    """The list that most nodes belong to, and the state of its members."""

    membership: Membership
    reports: Reports
    voters: frozenset[int]  # members that vote
    waiting: Mapping[int, str]  # members that can be admitted, with the id of the seat that each gets back
    complete: bool  # whether every node of the client answered, holds its own data of this list and is open

    @classmethod
    def of(cls, names: tuple[str, ...], reports: Reports) -> Census | None:
        """Return the census of the list that most open nodes name, else most closed ones; None without any.

        A node may hold the data of another node, as its former replica, or after a start with its file. Then
        it names the id of the other node, and has lost its own memory. So a node gets the seat that the list
        has for its address. If the list lacks the address, the node gets the seat of the id that it names. A
        blank node names no id, and gets no such seat, because a stranger would be an extra voter.
        """
        marked = [report for report in reports.values() if not report.blank]
        if not marked:
            return None
        lists = Counter(report.fingerprint for report in marked if not report.closed)
        lists = lists or Counter(report.fingerprint for report in marked)
        fingerprint = lists.most_common(1)[0][0]
        named = [report for report in marked if report.fingerprint == fingerprint]
        membership = Membership.from_json(Counter(r.members for r in named).most_common(1)[0][0])
        own = membership.seats_of(names)
        seats = {node: own.get(node, report.node_id) for node, report in reports.items()}
        out = {node for node, report in reports.items() if not report.admitted and not report.closed}
        taken = {seats[node] for node in reports if node not in out}
        waiting = {}
        for node in sorted(out, key=lambda node: (node not in own, node)):  # listed addresses come first
            seat = seats[node]
            if seat not in taken and (reports[node].node_id or seat) in membership.ids:
                waiting[node] = seat
                taken.add(seat)
        memories = {report.node_id for report in named if not report.closed}  # each counts once
        return cls(
            membership,
            reports,
            frozenset(node for node, report in reports.items() if report.votes_in(fingerprint)),
            waiting,
            complete=len(memories) == len(names) == len(membership.seats),
        )

    @property
    def has_quorum(self) -> bool:
        return len(self.voters) >= self.membership.quorum
