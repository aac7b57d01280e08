"""How a list of N blank nodes is made, and how an operator deletes a lost list.

Initialisation is explicit: a blank node does not vote. If nodes began to vote by themselves, a node that lost
its memory would look like a new one, and count from the beginning again.

Every node first gets a ticket, which becomes its id. Clients that initialise at the same time find the same
tickets, and the next client finishes an interrupted run. A node that restarted in between has another ticket
and is not opened, because it may have voted and forgotten.
"""

from __future__ import annotations

from typing import Final

from fencelock.authority.redlock.membership.establish import establish
from fencelock.authority.redlock.membership.members import Membership
from fencelock.authority.redlock.membership.reports import NodeGroup, NodeReport, Reports
from fencelock.authority.redlock.protocol.messages import Reply, ReplyKind, Steps
from fencelock.errors import MembershipError, QuorumError

#: Longest ttl in seconds of nodes that are initialised for the first time, if no other is given.
DEFAULT_MAX_TTL: Final = 60.0

_MOST_LOOKS: Final = 3
_FIT: Final = frozenset(
    {ReplyKind.TICKET, ReplyKind.ADMITTED, ReplyKind.OPENED, ReplyKind.NO_TICKET, ReplyKind.CLEARED}
)


def initialise(group: NodeGroup, *, base: int, max_ttl: float | None, epoch: int = 0) -> Steps[bool]:
    """Open N blank nodes, all of which must answer; return False if all were open before.

    Without a `max_ttl`, nodes that have one keep it. After a loss, `epoch` is above the epochs that the
    database has seen.
    """
    told: dict[int, Reply] = {}
    asked_ms = round((DEFAULT_MAX_TTL if max_ttl is None else max_ttl) * 1000)
    for node in range(len(group.names)):
        told[node] = yield from _need(group, node, "begin", "", group.new_word(), asked_ms, "")
    ttls = {node: _max_ttl_of(answer) for node, answer in told.items()}
    ids = {node: answer.facts[0] for node, answer in told.items()}
    seats = tuple(sorted((ids[node], group.names[node]) for node in ids))
    membership = Membership(seats, max(ttls.values()) if max_ttl is None else max_ttl)
    for _ in range(_MOST_LOOKS):
        before = yield from _look_again(group, membership, ids, ttls)
        blank = [node for node, report in before.items() if report.blank]
        if not blank:
            return False
        # Epoch 0 needs no promise, because there is no epoch below it. All nodes are asked to promise, also
        # those that another client has opened meanwhile, because few may be blank by now.
        epoch = max(epoch, *(report.highest for report in before.values()))
        promised = (yield from establish(group, membership, epoch, before, ids)) if epoch else before
        if len(promised) >= membership.quorum:
            yield from _open(group, membership, ids, epoch, base)
            yield from group.synced(blank)
            return True
    raise QuorumError(
        "another client is initialising these nodes, or they are restarting: run the same command again"
    )


def _max_ttl_of(answer: Reply) -> float:
    """Return the longest ttl of a node's list, or of its ticket."""
    is_member, fact = answer.kind is ReplyKind.ADMITTED, answer.facts[1]
    return Membership.from_json(fact).max_ttl if is_member else float(fact) / 1000


def _look_again(
    group: NodeGroup, membership: Membership, ids: dict[int, str], ttls: dict[int, float]
) -> Steps[Reports]:
    """Return the reports of the nodes, after a check that they held all tickets of the list at one time.

    If two lists differ, the differing nodes have lost their memory together, which only a minority may do.
    """
    reports = yield from _read(group)
    for node, report in reports.items():
        name = group.names[node]
        if (report.ticket if report.blank else report.node_id) != ids[node]:
            raise _interrupted(group, node)
        if not report.blank:
            _check_member(name, report, membership)
        if round(ttls[node] * 1000) != round(membership.max_ttl * 1000):
            raise MembershipError(
                f"{name} {'is being' if report.blank else 'was'} initialised with a longest ttl of "
                f"{ttls[node]:g} s, not {membership.max_ttl:g} s: use the same --max-ttl (max_ttl=)"
            )
    return reports


def _check_member(name: str, report: NodeReport, membership: Membership) -> None:
    if not report.admitted:
        raise MembershipError(
            f"{name} was initialised before and has restarted since. It does not vote until a client that "
            "uses it has admitted it again, which takes as long as the longest lease; `fencelock nodes` "
            "shows when. There is nothing to initialise"
        )
    theirs = Membership.from_json(report.members)
    if theirs.ids != membership.ids:
        raise MembershipError(
            f"{name} is in use already, in another list of {len(theirs.seats)} nodes: "
            f"{', '.join(theirs.addresses)}. Name exactly those nodes; a blank one among them has lost "
            "its memory, and is not initialised again"
        )


def _open(
    group: NodeGroup, membership: Membership, ids: dict[int, str], epoch: int, base: int
) -> Steps[None]:
    """Open the nodes in the order of their ids, each only after the nodes before it vote in this list.

    So only one of two clients with different lists gets beyond the first shared node. If their orders
    differed, each could open a majority.
    """
    for node in sorted(ids, key=ids.__getitem__):
        arguments = (membership.fingerprint, epoch, ids[node], base, membership.to_json())
        opened = yield from _need(group, node, "open", *arguments)
        if opened.kind is ReplyKind.NO_TICKET:
            raise _interrupted(group, node)
        if Membership.from_json(opened.facts[1]).fingerprint != membership.fingerprint:
            raise MembershipError(
                f"{group.names[node]} has just been initialised by another client, in another list: run the "
                "same command again to see which"
            )


def _interrupted(group: NodeGroup, node: int) -> MembershipError:
    return MembershipError(
        f"{group.names[node]} restarted while it was being initialised, and is blank again. If none of these "
        f"nodes has been used, delete the key {group.node_key} on each, and initialise again; else add "
        "--after-loss --database URL"
    )


def remains(group: NodeGroup) -> Steps[dict[str, tuple[str, ...]]]:
    """Return the nodes that remember a list which has lost its majority, each with the addresses of the list.

    The result is empty if a majority of a list votes, because nothing is lost then.
    """
    reports = yield from _read(group)
    lists = {n: Membership.from_json(report.members) for n, report in reports.items() if not report.blank}
    for known in lists.values():
        if sum(report.votes_in(known.fingerprint) for report in reports.values()) >= known.quorum:
            return {}
    return {group.names[node]: known.addresses for node, known in lists.items()}


def clear(group: NodeGroup) -> Steps[int]:
    """Delete the memory, locks and queues of the namespace on the nodes; return the number of keys."""
    yield from _read(group)
    count = 0
    for node in range(len(group.names)):
        following = ""
        while following != "0":
            following, deleted = (yield from _need(group, node, "clear", "", following or "0")).facts
            count += int(deleted)
    return count


def _need(group: NodeGroup, node: int, script: str, *arguments: str | int) -> Steps[Reply]:
    answer = (yield from group.ask(script, [node], *arguments))[node]
    if answer.kind not in _FIT:
        raise _unfit(group, node, answer)
    return answer


def _read(group: NodeGroup) -> Steps[Reports]:
    reports, answers = yield from group.read()
    for node, answer in answers.items():
        if node not in reports:
            raise _unfit(group, node, answer)
    return reports


def _unfit(group: NodeGroup, node: int, answer: Reply) -> QuorumError:
    name, count = group.names[node], len(group.names)
    return QuorumError(
        f"init needs a usable answer from all {count} nodes; {name}: {answer}", nodes={name: str(answer)}
    )
