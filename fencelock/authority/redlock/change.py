"""How other nodes take the place of these: close the old list, then open the new one.

Pure, as the protocol is. `spec/` has it in the model; the schedules that each step prevents:

1. BEGIN puts a ticket on each new node, which becomes its id: the fingerprint of the new list covers it. A
   node that was opened, voted and forgot has another ticket, hence belongs to another list, and cannot be
   taken for one that was never opened.
2. CLOSE on a majority of the old nodes, for this one next list. A second operator with another list finds
   it taken ("no next": both lists would vote).
3. A second look at the same nodes: they are closed still. One may have forgotten that, and have been
   admitted again by a majority that was not closed yet ("one closing pass"). What is closed takes part in
   no recovery.
4. The new epoch is above all that they know of. No counters are carried over: the epoch dominates.
5. PROMISE it to a majority of the *new* nodes, before any of them votes. Two operators who finish the same
   change may have chosen different epochs ("OPEN without PROMISE": the higher one could be used again). Then
   a second look, as in a recovery: they hold the promise all at the same time.
6. Wait for the leases that old nodes have granted: for mutual exclusion only.
7. A list's fingerprint covers that of the list before it, too: nobody who returns to an earlier choice of
   nodes gets an earlier list, whose messages may still be under way.
8. OPEN the new nodes first: then, wherever this is interrupted, the old list is closed by a majority still
   or the new one has a majority already. The next run finishes either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol.messages import Answers, Command, Request, Said, Sleep
from fencelock.authority.redlock.survey import Standing, Standings, ask, nodes_saying, read, synced
from fencelock.errors import MembershipError, QuorumError

_MOST_PASSES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """What a change of nodes has come to.

    Attributes:
        membership: the list that votes now.
        done: False if it did before.
        left_out: addresses of its nodes that do not vote yet, with what is to be known about each.
    """

    membership: Membership
    done: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which nodes are to vote, and how to speak to all that are concerned.

    Attributes:
        names: addresses of all nodes, old and new.
        wanted: those that are to vote afterwards.
        node_key: key of each node's hash.
        patience: seconds to wait for a node.
        new_word: makes a random word, for tickets.
        tell: told what is going on, as a sentence.
    """

    names: tuple[str, ...]
    wanted: tuple[int, ...]
    node_key: str
    patience: float
    new_word: Callable[[], str]
    tell: Callable[[str], None]

    @property
    def everybody(self) -> range:
        """Index of every node."""
        return range(len(self.names))

    @property
    def addresses(self) -> frozenset[str]:
        """Of the nodes that are to vote."""
        return frozenset(self.names[node] for node in self.wanted)

    def command(self, script: str, *arguments: str | int) -> Command:
        """Return a command that concerns no lock."""
        return Command(script, "", (self.node_key,), arguments)

    def describe(self, standings: Standings, answers: Answers) -> dict[str, str]:
        """Return what each node said, by its address, for an error."""
        return {
            name: _describe(standings[node], self.node_key) if node in standings else str(answers[node])
            for node, name in enumerate(self.names)
        }


def change(plan: Plan) -> Generator[Request, Any, Change]:
    """Let the wanted nodes vote instead of those that do now. May be run again after an interruption.

    Raises:
        QuorumError: too few of the old nodes vote, or not all of the new ones answer.
        MembershipError: a new node is in use elsewhere, or another change is under way.
    """
    standings, answers = yield from read(plan.node_key, plan.everybody, plan.patience)
    old = _present_list(standings)
    if old is None:
        raise MembershipError(
            f"none of these nodes belongs to a list that could be changed: {', '.join(plan.names)}; "
            "name the nodes that are in use now"
        )
    if _addresses_of(old) == plan.addresses:
        opened = yield from _open_stragglers(plan, old, standings)
        if opened:
            standings, answers = yield from read(plan.node_key, plan.everybody, plan.patience)
        return Change(old, done=opened, left_out=_left_out(plan, old, standings, answers))
    target = _next_list(plan, old, standings)
    if target is None:
        target = yield from _make_list(plan, old, standings, answers)
    _check_closable(plan, old, target, standings, answers)
    epoch = yield from _close(plan, old, target)
    yield from _promise(plan, target, epoch)
    yield from _outwait_leases(plan, standings)
    yield from _open(plan, target, epoch)
    standings, answers = yield from read(plan.node_key, plan.everybody, plan.patience)
    if _votes(plan, target, standings) < _majority(len(plan.wanted)):
        raise QuorumError(
            "too few of the new nodes could be opened: bring them back, and run the same command again",
            nodes=plan.describe(standings, answers),
        )
    return Change(target, done=True, left_out=_left_out(plan, target, standings, answers))


def _majority(count: int) -> int:
    return count // 2 + 1


def _lists(texts: Iterable[str]) -> list[Membership]:
    return [Membership.from_json(text) for text, _ in Counter(filter(None, texts)).most_common()]


def _addresses_of(membership: Membership) -> frozenset[str]:
    return frozenset(address for _, address in membership.seats)


def _present_list(standings: Standings) -> Membership | None:
    """Return the list that votes by majority; else one that is closed for another; else the commonest."""
    marked = [standing for standing in standings.values() if not standing.blank]
    for known in _lists(standing.members for standing in marked):
        voters = sum(standing.votes_in(known.fingerprint) for standing in marked)
        if voters >= _majority(len(known.seats)):
            return known
    closed = _lists(standing.members for standing in marked if standing.closed)
    return next(iter(closed or _lists(standing.members for standing in marked)), None)


def _next_list(plan: Plan, old: Membership, standings: Standings) -> Membership | None:
    """Return the list for which the old one is being closed already; a change is never begun twice.

    Not any list of these nodes that some node still knows: one that has been replaced must not come back.
    """
    members = [standing for standing in standings.values() if standing.fingerprint == old.fingerprint]
    for standing in members:
        if standing.closed:
            known = Membership.from_json(standing.next_members)
            if _addresses_of(known) != plan.addresses:
                _refuse_other_change(standing)
            return known
    return None


def _make_list(
    plan: Plan, old: Membership, standings: Standings, answers: Answers
) -> Generator[Request, Any, Membership]:
    """Make the new list: nodes that stay keep their ids, new ones get a ticket for theirs."""
    missing = [plan.names[node] for node in plan.wanted if node not in standings]
    if missing:
        raise QuorumError(
            f"every node that is to vote must answer, and {', '.join(missing)} does not",
            nodes=plan.describe(standings, answers),
        )
    ids: dict[int, str] = {}
    seats = {address: node_id for node_id, address in old.seats}
    for node in plan.wanted:
        name, standing = plan.names[node], standings[node]
        if standing.votes_in(old.fingerprint):
            ids[node] = standing.node_id
        elif name in seats or not standing.blank:
            _refuse_node(name, standing, old, plan.node_key)
        else:
            ids[node] = yield from _new_id(plan, node, old)
    doubled = {said for said, times in Counter(ids.values()).items() if times > 1}  # see recovery.py
    for node in [node for node in ids if ids[node] in doubled]:
        ids[node] = seats.get(plan.names[node], ids[node])
    if len(set(ids.values())) < len(ids):
        raise MembershipError(
            "two of the nodes that are to stay say the same id: name each as in the present list "
            f"({', '.join(seats)}), or leave one of them out"
        )
    seats_now = tuple(sorted((ids[node], plan.names[node]) for node in plan.wanted))
    return Membership(seats_now, old.max_ttl, after=old.fingerprint)


def _new_id(plan: Plan, node: int, old: Membership) -> Generator[Request, Any, str]:
    command = plan.command("begin", "", plan.new_word(), round(old.max_ttl * 1000), "")
    answers = yield from ask(command, [node], plan.patience)
    if answers[node].said is not Said.TICKET:
        raise QuorumError(
            f"{plan.names[node]} cannot be made a member: {answers[node]}",
            nodes={plan.names[node]: str(answers[node])},
        )
    return answers[node].facts[0]


def _refuse_node(name: str, standing: Standing, old: Membership, node_key: str) -> NoReturn:
    if standing.node_id in old.ids or name in _addresses_of(old):
        raise MembershipError(
            f"{name} does not vote at the moment, and a node that stays must: wait until clients have "
            "admitted it again (`fencelock nodes` tells when), or leave it out"
        )
    raise MembershipError(
        f"{name} is in use in another list: {', '.join(sorted(_addresses_of_text(standing.members)))}. "
        f"If nothing needs that any more, delete the key {node_key} there; or name another"
    )


def _addresses_of_text(members: str) -> frozenset[str]:
    return _addresses_of(Membership.from_json(members))


def _check_closable(
    plan: Plan, old: Membership, target: Membership, standings: Standings, answers: Answers
) -> None:
    """Refuse before anything is closed, where it could not be brought to an end."""
    members = [s for s in standings.values() if s.admitted and s.fingerprint == old.fingerprint]
    for standing in members:
        if standing.next_fingerprint not in {"", target.fingerprint}:
            _refuse_other_change(standing)
    if len(members) < _majority(len(old.seats)):
        raise QuorumError(
            f"{len(members)} of the {len(old.seats)} nodes in use vote, and a majority of them must agree to "
            f"be replaced: bring the others back, and name all of them as the present nodes "
            f"({', '.join(sorted(_addresses_of(old)))})",
            nodes=plan.describe(standings, answers),
        )


def _refuse_other_change(standing: Standing) -> NoReturn:
    others = sorted(_addresses_of_text(standing.next_members))
    raise MembershipError(
        f"another change is under way already, to {', '.join(others)}: finish that one first, with "
        f"`fencelock nodes set {' '.join(others)}`"
    )


def _close(plan: Plan, old: Membership, target: Membership) -> Generator[Request, Any, int]:
    """Close a majority of the old nodes, and return an epoch above all that was voted in there."""
    plan.tell("closing the present list")
    quorum = _majority(len(old.seats))
    command = plan.command("close", old.fingerprint, target.fingerprint, target.to_json())
    for _ in range(_MOST_PASSES):
        answers = yield from ask(command, plan.everybody, plan.patience)
        shut = yield from synced(nodes_saying(answers, Said.SHUT), plan.patience)
        standings = yield from _closed_still(plan, shut, old, target)
        if len(standings) >= quorum:
            return max(standing.highest for standing in standings.values()) + 1
    told, answers = yield from read(plan.node_key, plan.everybody, plan.patience)
    for standing in told.values():
        if standing.fingerprint == old.fingerprint and standing.next_fingerprint not in {
            "",
            target.fingerprint,
        }:
            _refuse_other_change(standing)
    raise QuorumError(
        "a majority of the present nodes could not be closed: bring them back, and run the same command "
        "again",
        nodes=plan.describe(told, answers),
    )


def _closed_still(
    plan: Plan, shut: Iterable[int], old: Membership, target: Membership
) -> Generator[Request, Any, Standings]:
    """The second pass: return those that were closed all the time since the first."""
    standings, _ = yield from read(plan.node_key, shut, plan.patience)
    return {
        node: standing
        for node, standing in standings.items()
        if standing.admitted
        and standing.fingerprint == old.fingerprint
        and standing.next_fingerprint == target.fingerprint
    }


def _promise(plan: Plan, target: Membership, epoch: int) -> Generator[Request, Any, None]:
    ids = {address: node_id for node_id, address in target.seats}
    promised: set[int] = set()
    before, _ = yield from read(plan.node_key, plan.wanted, plan.patience)
    for node in before:
        command = plan.command("promise", target.fingerprint, epoch, ids[plan.names[node]], "change")
        answers = yield from ask(command, [node], plan.patience)
        promised |= nodes_saying(answers, Said.PROMISED)
    promised = yield from synced(promised, plan.patience)
    told, _ = yield from read(plan.node_key, promised, plan.patience)
    promised = {node for node, standing in told.items() if standing.still_promises(epoch, before[node])}
    if len(promised) < _majority(len(plan.wanted)):
        silent = [plan.names[node] for node in plan.wanted if node not in promised]
        raise QuorumError(
            f"too few of the new nodes are ready: bring back {', '.join(silent)} as they were, and run the "
            "same command again; until then no lock is granted. What has restarted meanwhile cannot come "
            "back as it was: then fencelock init --after-loss",
            nodes=dict.fromkeys(silent, "not ready"),
        )


def _outwait_leases(plan: Plan, standings: Standings) -> Generator[Request, Any, None]:
    """Wait until no lock lives on the closed nodes: a majority knows each lease, and none is extended now."""
    longest = 0.0
    for node, standing in standings.items():
        if not standing.blank:
            longest = max(longest, (yield from _longest_lease(plan, node)))
    if longest:
        plan.tell(f"waiting {longest:.0f} s for the leases that are held")
        yield Sleep(longest)


def _longest_lease(plan: Plan, node: int) -> Generator[Request, Any, float]:
    cursor, longest = "0", 0.0
    while True:
        answers = yield from ask(plan.command("leases", "", cursor), [node], plan.patience)
        if answers[node].said is not Said.LEASES:
            return longest
        cursor, part = answers[node].facts
        longest = max(longest, int(part) / 1000)
        if cursor == "0":
            return longest


def _open(plan: Plan, target: Membership, epoch: int) -> Generator[Request, Any, None]:
    plan.tell("opening the new list")
    ids = {address: node_id for node_id, address in target.seats}
    standings, _ = yield from read(plan.node_key, plan.wanted, plan.patience)
    opened: set[int] = set()
    for node in sorted(standings, key=lambda node: not standings[node].blank):
        arguments = (target.fingerprint, epoch, ids[plan.names[node]], 0, target.to_json())
        answers = yield from ask(plan.command("open", *arguments), [node], plan.patience)
        opened |= nodes_saying(answers, Said.OPENED)
    yield from synced(opened, plan.patience)


def _open_stragglers(plan: Plan, present: Membership, standings: Standings) -> Generator[Request, Any, bool]:
    """Open the nodes that an interrupted change has left, and tell whether there were any.

    They have not voted in this list yet. Their epoch is above all that its voters know of, as in a recovery.
    """
    ids = {address: node_id for node_id, address in present.seats}
    waiting = {
        node: standing
        for node, standing in standings.items()
        if node in plan.wanted
        and (
            (standing.admitted and standing.next_fingerprint == present.fingerprint)
            or (standing.blank and standing.ticket and standing.ticket == ids[plan.names[node]])
        )
    }
    voters = {node: s for node, s in standings.items() if s.votes_in(present.fingerprint)}
    if not waiting or len(voters) < _majority(len(present.seats)):
        return False
    epoch = max(standing.highest for standing in (voters | waiting).values()) + 1
    yield from _promise(plan, present, epoch)
    answers = yield from ask(plan.command("raise", present.fingerprint, epoch), voters, plan.patience)
    if len(nodes_saying(answers, Said.RAISED)) >= _majority(len(present.seats)):
        yield from _open(plan, present, epoch)
    return True


def _votes(plan: Plan, target: Membership, standings: Standings) -> int:
    return sum(node in standings and standings[node].votes_in(target.fingerprint) for node in plan.wanted)


def _left_out(plan: Plan, target: Membership, standings: Standings, answers: Answers) -> dict[str, str]:
    found = {}
    for node in plan.wanted:
        standing = standings.get(node)
        if standing is None:
            found[plan.names[node]] = str(answers[node])
        elif not standing.votes_in(target.fingerprint):
            found[plan.names[node]] = _describe(standing, plan.node_key)
    return found


def _describe(standing: Standing, node_key: str) -> str:
    if standing.blank:
        return "blank: clients admit it when the longest lease has passed"
    if not standing.admitted and not standing.closed:
        return "restarted: clients admit it when the longest lease has passed"
    if standing.closed:
        return f"closed with its former list: delete its key {node_key}, and clients admit it"
    members = ", ".join(sorted(_addresses_of_text(standing.members)))
    return f"votes in epoch {standing.epoch} of the list {members}"
