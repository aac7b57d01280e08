"""How other nodes replace the present ones: close the old list, then open the new one.

`establish.py` has the steps that all procedures share. The other steps are these, each with the schedule in
`proof/spec` that it prevents:

1. BEGIN puts a ticket on each new node. The ticket becomes the id of the node, which the fingerprint of the
   new list covers. A node that was opened, has voted and lost its memory gets another ticket, so it is not
   taken for a node that was never opened.
2. CLOSE on a majority of the old nodes, for one next list. A second operator with another list finds the
   nodes closed for the first list ("no next": both lists would vote).
3. A second READ shows that the same nodes are still closed. Otherwise a node may have lost its memory, and
   been admitted again by a majority that was not closed yet ("one closing pass").
4. The new epoch is above all epochs that the closed nodes know. Counters are not carried over, because all
   tokens of a later epoch are larger. Two operators that finish the same change may choose different epochs,
   so a majority of the *new* nodes promises the epoch ("OPEN without PROMISE").
5. Before the promise, wait for the leases of the old nodes. This serves mutual exclusion only.
6. OPEN the nodes that are new before those that stay. Then, after any interruption, a majority of the old
   list is still closed, or the new list has a majority already. The next run finishes the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fencelock.authority.redlock.membership.establish import establish, let_vote
from fencelock.authority.redlock.membership.members import Membership
from fencelock.authority.redlock.membership.reports import NodeGroup, NodeReport, Reports, saying
from fencelock.authority.redlock.protocol.messages import ReplyKind, Sleep, Steps
from fencelock.errors import MembershipError, QuorumError

_MOST_PASSES: Final = 3


@dataclass(frozen=True, slots=True)
class Change:
    """The result of a change of nodes."""

    done: bool  # False if there was nothing to do, because the wanted list was the present one
    left_out: Mapping[str, str]  # addresses of wanted nodes that do not vote yet, with the reason of each


def change(
    group: NodeGroup, wanted: Sequence[int], tell: Callable[[str], None], max_ttl: float | None = None
) -> Steps[Change]:
    """Let the `wanted` nodes of a group vote instead of those that vote now: see `change_nodes`."""
    reports, told = yield from _read(group)
    old = _present_list(reports)
    if old is None:
        raise MembershipError(
            f"none of these nodes belongs to a list that could be changed: {', '.join(group.names)}; "
            "name the nodes that are in use now"
        )
    addresses = {group.names[node] for node in wanted}
    following = _next_lists(old, reports)
    is_present = set(old.addresses) == addresses and max_ttl in (None, old.max_ttl)
    if is_present and all(set(known.addresses) != addresses for known in following):
        target, epoch = old, _epoch_of_stragglers(group, old, reports)
    else:
        target = _chosen(following, addresses, max_ttl) or (
            yield from _make_list(group, old, wanted, reports, told, max_ttl=max_ttl or old.max_ttl)
        )
        _check_closable(old, reports, told)
        tell("closing the present list")
        epoch = yield from _close(group, old, target)
        yield from _outwait_leases(group, reports, tell)
    if epoch:
        tell("opening the new list")
        yield from _open(group, target, epoch, wanted)
        reports, told = yield from _read(group)
    votes = {node for node, report in reports.items() if report.votes_in(target.fingerprint)}
    left_out = {group.names[node]: told[group.names[node]] for node in wanted if node not in votes}
    if epoch and len(wanted) - len(left_out) < target.quorum:
        raise QuorumError(
            "too few of the new nodes could be opened: bring them back, and run the same command again",
            nodes=told,
        )
    return Change(bool(epoch), left_out)


def _read(group: NodeGroup) -> Steps[tuple[Reports, dict[str, str]]]:
    """Return the reports of all nodes, and a text about each node, by its address."""
    reports, answers = yield from group.read()
    told = {
        name: _describe(reports[node], group.node_key) if node in reports else str(answers[node])
        for node, name in enumerate(group.names)
    }
    return reports, told


def _describe(report: NodeReport, node_key: str) -> str:
    if report.closed:
        return f"closed with its former list: delete its key {node_key}, and clients admit it"
    if not report.admitted:
        state = "blank" if report.blank else "restarted"
        return f"{state}: clients admit it when the longest lease has passed"
    return f"votes in epoch {report.epoch} of the list {addresses_of(report.members)}"


def addresses_of(members: str) -> str:
    return ", ".join(sorted(Membership.from_json(members).addresses))


def _lists(texts: Iterable[str]) -> list[Membership]:
    return [Membership.from_json(text) for text, _ in Counter(filter(None, texts)).most_common()]


def _present_list(reports: Reports) -> Membership | None:
    """Return the list whose majority votes; else one that is closed for another; else the most named one."""
    lists = _lists(report.members for report in reports.values())
    for known in lists:
        if sum(report.votes_in(known.fingerprint) for report in reports.values()) >= known.quorum:
            return known
    return next(iter(_lists(r.members for r in reports.values() if r.closed) or lists), None)


def _epoch_of_stragglers(group: NodeGroup, present: Membership, reports: Reports) -> int:
    """Return an epoch for nodes that an interrupted change has not opened; 0 if none can be opened.

    These nodes have not voted in this list yet. The epoch is above all that they and the voters know.
    """
    voters = [report for report in reports.values() if report.votes_in(present.fingerprint)]
    waiting = []
    for node, node_id in present.seats_of(group.names).items():
        report = reports.get(node)
        if report is not None and (
            (report.admitted and report.next_fingerprint == present.fingerprint)
            or (report.blank and report.ticket == node_id)
        ):
            waiting.append(report)
    if not waiting or len(voters) < present.quorum:
        return 0
    return max(report.highest for report in voters + waiting) + 1


def _next_lists(old: Membership, reports: Reports) -> list[Membership]:
    """Return the lists for which nodes of the old list are closed.

    Other lists that a node still knows do not count, because a replaced list must not come back.
    """
    return _lists(r.next_members for r in reports.values() if r.fingerprint == old.fingerprint)


def _chosen(following: list[Membership], addresses: set[str], max_ttl: float | None) -> Membership | None:
    """Return the list of this change if it is under way, or None; MembershipError if another change is."""
    for known in following:
        if set(known.addresses) != addresses or max_ttl not in (None, known.max_ttl):
            others = sorted(known.addresses)
            raise MembershipError(
                f"another change is under way already, to {', '.join(others)} and a longest lease of "
                f"{known.max_ttl:g} s: finish that one first, with "
                f"`fencelock nodes set --max-ttl {known.max_ttl:g} {' '.join(others)}`"
            )
    return next(iter(following), None)


def _make_list(
    group: NodeGroup,
    old: Membership,
    wanted: Sequence[int],
    reports: Reports,
    told: dict[str, str],
    *,
    max_ttl: float,
) -> Steps[Membership]:
    """Make the new list: nodes that stay keep their ids, and new nodes get a ticket, which is their id."""
    missing = [group.names[node] for node in wanted if node not in reports]
    if missing:
        raise QuorumError(
            f"every node that is to vote must answer, and {', '.join(missing)} does not", nodes=told
        )
    ids: dict[int, str] = {}
    seats = old.seats_of(group.names)
    for node in wanted:
        name, report = group.names[node], reports[node]
        if report.votes_in(old.fingerprint):
            ids[node] = seats.get(node, report.node_id)  # a node may name another's id: see Census.of
        elif node in seats or report.node_id in old.ids:
            raise MembershipError(
                f"{name} does not vote now, but a node that stays must vote: wait until clients have "
                "admitted it again (`fencelock nodes` shows when), or leave it out"
            )
        elif not report.blank:
            raise MembershipError(
                f"{name} is in use in another list: {addresses_of(report.members)}. If no program needs that "
                f"list any more, delete the key {group.node_key} there; otherwise name another node"
            )
        else:
            begin = ("", group.new_word(), round(max_ttl * 1000), "")
            answer = (yield from group.ask("begin", [node], *begin))[node]
            if answer.kind is not ReplyKind.TICKET:
                raise QuorumError(f"{name} cannot be made a member: {answer}", nodes={name: str(answer)})
            ids[node] = answer.facts[0]
    if len(set(ids.values())) < len(ids):
        raise MembershipError(
            "two of the nodes that stay have the same id: name each as in the present list "
            f"({', '.join(old.addresses)}), or leave one of them out"
        )
    seats_now = tuple(sorted((ids[node], group.names[node]) for node in wanted))
    return Membership(seats_now, max_ttl, after=old.fingerprint)


def _check_closable(old: Membership, reports: Reports, told: dict[str, str]) -> None:
    """Raise QuorumError before anything is closed, if the change could not be finished."""
    members = sum(report.admitted and report.fingerprint == old.fingerprint for report in reports.values())
    if members < old.quorum:
        raise QuorumError(
            f"{members} of the {len(old.seats)} nodes in use vote, and a majority must agree to the change: "
            "bring the others back, and name all of them as the present nodes "
            f"({', '.join(sorted(old.addresses))})",
            nodes=told,
        )


def _close(group: NodeGroup, old: Membership, target: Membership) -> Steps[int]:
    """Close a majority of the old nodes, and return an epoch above all in which they may have voted."""
    arguments = (old.fingerprint, target.fingerprint, target.to_json())
    for _ in range(_MOST_PASSES):
        answers = yield from group.ask("close", range(len(group.names)), *arguments)
        shut = yield from group.synced(saying(answers, ReplyKind.SHUT))
        closed = yield from _closed_still(group, shut, old, target)
        if len(closed) >= old.quorum:
            return max(report.highest for report in closed.values()) + 1
    reports, told = yield from _read(group)
    # This raises a clearer error if another operator was quicker.
    _chosen(_next_lists(old, reports), set(target.addresses), target.max_ttl)
    raise QuorumError(
        "a majority of the present nodes could not be closed: bring them back, and run the same command "
        "again",
        nodes=told,
    )


def _closed_still(
    group: NodeGroup, shut: Iterable[int], old: Membership, target: Membership
) -> Steps[Reports]:
    """Read the nodes once more; return those that have stayed closed since CLOSE."""
    reports, _ = yield from group.read(shut)
    lists = (old.fingerprint, target.fingerprint)
    return {n: r for n, r in reports.items() if r.admitted and (r.fingerprint, r.next_fingerprint) == lists}


def _outwait_leases(group: NodeGroup, reports: Reports, tell: Callable[[str], None]) -> Steps[None]:
    """Wait until all leases that the nodes know have ended: a majority knows each lease, and extends none."""
    longest = 0.0
    for node in (node for node, report in reports.items() if not report.blank):
        cursor = ""
        while cursor != "0":
            answer = (yield from group.ask("leases", [node], "", cursor or "0"))[node]
            if answer.kind is not ReplyKind.LEASES:
                break
            cursor, left_ms = answer.facts
            longest = max(longest, int(left_ms) / 1000)
    if longest:
        tell(f"waiting {longest:.0f} s until the held leases have ended")
        yield Sleep(longest)


def _open(group: NodeGroup, target: Membership, epoch: int, wanted: Sequence[int]) -> Steps[None]:
    """Ask the new nodes to promise the epoch; if a majority does, open all of them that can be opened."""
    ids = target.seats_of(group.names)
    before, _ = yield from group.read(wanted)
    promised = yield from establish(group, target, epoch, before, ids)
    if len(promised) < target.quorum:
        silent = [group.names[node] for node in wanted if node not in promised]
        raise QuorumError(
            f"too few of the new nodes are ready: bring back {', '.join(silent)} without a restart, and run "
            "the same command again; until then no lock is granted. If one of them has restarted "
            "meanwhile: fencelock init --after-loss",
            nodes=dict.fromkeys(silent, "not ready"),
        )
    new_first = sorted(before, key=lambda node: not before[node].blank)
    yield from let_vote(group, "open", target, epoch, {node: (ids[node], 0) for node in new_first})
