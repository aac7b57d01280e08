"""Nodes and clients that keep one rule less than the shipped ones. They exist only here.

Each has the name of the missing part; `mutants.py` says which rule that is, and which check finds it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from fencelock._generators import Steps
from fencelock.authority.base import Grant
from fencelock.authority.redlock.membership import recover
from fencelock.authority.redlock.membership.members import Membership, MembershipView
from fencelock.authority.redlock.membership.reports import NodeGroup, NodeReport, Reports
from fencelock.authority.redlock.protocol import attempts, messages
from fencelock.authority.redlock.protocol.attempts import Attempt, NodeSet
from fencelock.authority.redlock.protocol.messages import (
    Broadcast,
    Command,
    NodeReplies,
    Replies,
    Reply,
    ReplyKind,
)
from fencelock.lock.lock import FencedLock
from fencelock.lock.releasing import release_hold_gen
from fencelock.lock.slots import OneOf, WriterLock
from proof.simulation.node import Lock, ModelNode


class WithoutOwnership(ModelNode):
    """CONFIRM does not ask whose the lock is."""

    def is_ours(self, lock: Lock | None, nonce: str) -> bool:  # noqa: ARG002 - the mutation
        return lock is not None

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - belongs to it
        """Compare nothing: the lock that is there is not the one that was granted."""
        return False


class WithoutComparison(ModelNode):
    """CONFIRM counts where the node itself had granted more."""

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - the mutation
        return False


class MakesLocksAsVoter(ModelNode):
    """EXTEND makes no locks on a node that does not vote."""

    def makes_locks(self, refused: Reply, fingerprint: str) -> bool:  # noqa: ARG002 - the mutation
        return False


class ForgetfulPromise(ModelNode):
    """PROMISE is acknowledged and forgotten."""

    def keep_promise(self, epoch: int) -> None:
        """Forget it."""


class ClosedForAnybody(ModelNode):
    """CLOSE takes any next list, also after another."""

    def may_close(self, following: str) -> bool:  # noqa: ARG002 - the mutation
        return True


class OpenAllTheTime(ModelNode):
    """A node that is closed votes on in its list, whatever it has been told."""

    def refusal(self, fingerprint: str) -> Reply | None:
        refused = super().refusal(fingerprint)
        return None if refused is not None and refused.kind is ReplyKind.CLOSED else refused

    def votes_in(self, fingerprint: str) -> bool:
        return self.admitted and bool(self.hash["cfg"] == fingerprint)


class WithoutCatchingUp(ModelNode):
    """RELEASE leaves counters that lag behind as they are."""

    def on_release(self, stripes: Sequence[int], decided: Sequence[int]) -> None:
        """Learn nothing."""


class Credulous(ModelNode):
    """A node counts on from any number, whichever client names it."""

    def is_near(self, number: int, last: int) -> bool:  # noqa: ARG002 - the mutation
        return True

    def may_raise(self, lock: Lock | None, nonce: str) -> bool:  # noqa: ARG002 - the mutation
        return True


class CountsMadeAgain(ModelNode):
    """EXTEND says of a lock that it has made again what it says of one that was there."""

    after_making_again: ClassVar[int] = 2


class ReleasesAnybodys(ModelNode):
    """RELEASE deletes whatever lock is there."""

    def may_release(self, lock: Lock, nonce: str) -> bool:  # noqa: ARG002 - the mutation
        return True


class AnyProcess(ModelNode):
    """A node that restarted votes on, for its marker is there."""

    asks_for_run: ClassVar[bool] = False


class AnyMemory(ModelNode):
    """A node that has loaded older data votes on, for its process is the same."""

    asks_for_memory: ClassVar[bool] = False


class MarkerOnDemand(ModelNode):
    """A blank node makes itself a marker when a client wants its vote."""

    def when_blank(self, fingerprint: str) -> Reply | None:
        self.hash = {"e": 0, "p": 0, "r": self.run, "cfg": fingerprint, "b": self.first_counter()}
        self.unbroken = True
        return None

    def first_counter(self) -> int:
        return 0

    def execute(self, command: Command) -> Reply:
        """Execute a script, unless it would tell of the seat and the list, which are not known."""
        if command.script in {"admit", "begin", "open"} and "e" in self.hash and "id" not in self.hash:
            return Reply(ReplyKind.ERROR)
        return super().execute(command)


class ClockInsteadOfMemory(MarkerOnDemand):
    """The same, but its counters start at what its clock says."""

    def first_counter(self) -> int:
        return max(0, int(self.now))


class AdmitsWithoutTicket(ModelNode):
    """ADMIT asks for no ticket."""

    def admit(self, cfg: str, epoch: int, ticket: str, seat: str, members: str) -> Reply:
        if not self.admitted:
            self.hash |= {"ticket": ticket, "ticket_of": self.run, "ticket_at": 0, "ticket_ttl": 0}
            self.unbroken = True
        return super().admit(cfg, epoch, ticket, seat, members)


class AdmitsAtOnce(ModelNode):
    """ADMIT does not wait until the locks have ended that the node has forgotten."""

    def ms_out(self) -> int:
        return 0


class TicketOfAnyProcess(ModelNode):
    """A ticket is good for the process that comes after the one which made it."""

    def holds(self, ticket: str) -> bool:
        return bool(ticket) and bool(self.hash.get("ticket") == ticket)

    def admit(self, cfg: str, epoch: int, ticket: str, seat: str, members: str) -> Reply:
        """Be as good as the process that has made the ticket."""
        self.unbroken |= self.holds(ticket)
        return super().admit(cfg, epoch, ticket, seat, members)


class TicketOfTheClient(ModelNode):
    """The ticket is what the client has made up."""

    def new_ticket(self, word: str) -> str:
        return word


class AdmitLowersPromise(ModelNode):
    """ADMIT forgets what the node has promised meanwhile."""

    def promise_to_keep(self, epoch: int) -> int:
        return epoch


def maximum_without_write_back(
    _node_set: NodeSet,
    _attempt: Attempt,
    _answers: dict[int, Reply],
    _epoch: int,
    granted: dict[int, tuple[int, ...]],
    ended: float,
) -> Generator[Broadcast, Replies, tuple[tuple[int, ...] | None, float]]:
    """Decide the maximum and tell no node: instead of `acquire._decide`."""
    yield from ()
    return attempts.maximum_of(granted.values()), ended


def mixed_epochs(answers: NodeReplies) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Add up the votes of all epochs: instead of `attempts.largest_epoch`."""
    granted = {node: answer for node, answer in answers.items() if answer.kind is ReplyKind.GRANTED}
    epoch = min((answer.epoch for answer in granted.values()), default=0)
    return epoch, {node: answer.counters for node, answer in granted.items()}


_shipped_choice = recover._choose_epoch


def same_epoch(*arguments: Any) -> Generator[Any, Any, tuple[int, Reports] | None]:
    """Choose the epoch that is there already: instead of `recover._choose_epoch`."""
    chosen = yield from _shipped_choice(*arguments)
    return None if chosen is None else (chosen[0] - 1, chosen[1])


def no_promise(
    _group: Any, _membership: Any, _epoch: int, before: Reports, _tickets: Any
) -> Generator[Any, Any, set[int]]:
    """Go on as if all had promised: instead of `establish.promise`."""
    yield from ()
    return set(before)


def still_promises(*_: Any) -> bool:
    """Do not look again: instead of `NodeReport.still_promises`."""
    return True


def no_raise(_group: Any, _list: Any, _epoch: int, nodes: Iterable[int]) -> Generator[Any, Any, set[int]]:
    """Raise no node: instead of `establish.raise_voters`."""
    yield from ()
    return set(nodes)


def no_second_look(
    group: NodeGroup, shut: Iterable[int], *_: Any
) -> Generator[Any, Any, dict[int, NodeReport]]:
    """Take the nodes for closed that said so once: instead of `change._closed_still`."""
    return (yield from group.read(shut))[0]


def owe_nothing(_node: Any, _release: Command) -> None:
    """Keep no RELEASE for the next connection: instead of `_Node.owe`."""


def abandon_nothing(*_: Any, **_more: Any) -> Generator[Broadcast, Replies, None]:
    """Release nothing of an attempt that came to nothing: instead of `attempts.abandon`."""
    yield from ()


def still_extended_all_gone(node_set: NodeSet, answers: NodeReplies, index: int) -> bool | None:
    """Add up blank nodes and those that have made the lock again: instead of `holding._still_extended`."""
    voters = [answer for answer in answers.values() if answer.kind is ReplyKind.EXTENDED]
    extended = sum(answer.counters[index] == messages.KEPT for answer in voters)
    blank = sum(answer.kind is ReplyKind.AMNESIA for answer in answers.values())
    if extended >= node_set.quorum:
        return True
    gone = len(voters) - extended + blank
    return None if len(node_set.names) - gone >= node_set.quorum else False


_shipped_note = MembershipView.note


def forgetful_note(view: MembershipView, node: int, node_id: str, membership: Membership | None) -> None:
    """Let go of what a node has said when it comes back blank: instead of `MembershipView.note`."""
    if membership is None:
        view._said.pop(node, None)
    _shipped_note(view, node, node_id, membership)


def writer_without_slots(lock: Any, block: Any, missing: tuple[str, ...]) -> Steps[Grant]:
    """Take only the resource."""
    return FencedLock._grant_gen(lock, block, missing[:1])


def all_or_nothing(lock: Any, block: Any, missing: tuple[str, ...]) -> Steps[Grant]:
    """Wait for a moment in which all slots are free."""
    return FencedLock._grant_gen(lock, block, missing)


def slot_beyond(lock: Any, block: Any, missing: tuple[str, ...]) -> Steps[Grant]:
    """Take a slot that a writer does not know of, as a program with more of them would."""
    block.names = (missing[-1] + "0",)
    return FencedLock._grant_gen(lock, block, block.names)


def names_another_slot(lock: Any, block: Any, missing: tuple[str, ...]) -> Steps[Grant]:
    """Say always the first slot, whichever was granted."""
    grant = yield from _GRANT_SLOT(lock, block, missing)
    block.names = missing[:1]
    return replace(grant, resources=block.names)


def give_slot_back(lock: Any, block: Any, name: str, end: float) -> Steps[None]:
    """Give each slot back while the next one is waited for."""
    yield from _COLLECT(lock, block, name, end)
    if "#" in name:
        *block.holds, its = block.holds
        its.blocks.discard(block.mark)
        yield from release_hold_gen(its)


_GRANT_SLOT, _COLLECT = OneOf._grant_gen, WriterLock._collect_gen
