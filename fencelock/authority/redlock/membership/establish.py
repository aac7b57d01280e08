"""How nodes come to vote in a new epoch: the steps that init, recovery, rise and change of nodes share.

    an epoch above all that is known → PROMISE on a majority, on their disks → a second READ
    → RAISE those that vote → OPEN or ADMIT the others, on their disks

`proof/spec/` has a model of this, with the schedules that each step prevents:

- PROMISE on a majority before any node votes in the epoch. Otherwise the only voter may forget the epoch, and
  the next client chooses the same one ("RAISE without PROMISE", which takes five nodes; "OPEN without
  PROMISE").
- A second READ after all promises shows that the nodes hold them at one time. Otherwise a node may forget its
  promise, and be admitted by a client that read the others before they promised ("one look at promises").
- RAISE a majority before ADMIT. A new server may take over the address of a server that still runs, but is
  cut off. The old server must not keep a majority in the old epoch ("ADMIT before RAISE"). If fewer nodes
  than a majority vote, RAISE all of them ("all restarted, no RAISE").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fencelock.authority.redlock.membership.members import Membership
from fencelock.authority.redlock.membership.reports import NodeGroup, Reports, saying
from fencelock.authority.redlock.protocol.messages import ReplyKind, Steps
from fencelock.tokens import MAX_EPOCH


def establish(
    group: NodeGroup, membership: Membership, epoch: int, before: Reports, tickets: Mapping[int, str]
) -> Steps[set[int]]:
    """Bring a list to an epoch above all that it knows; return the nodes that have promised the epoch.

    It returns none if too few could be raised. If it returns no quorum, do not OPEN or ADMIT any node.
    `before` has the reports of the nodes to ask; those that vote in the list are raised. `tickets` has the
    tickets of the other nodes; in a new list, their ids.
    """
    promised = yield from promise(group, membership, epoch, before, tickets)
    if len(promised) < membership.quorum:
        return promised
    voters = [node for node, report in before.items() if report.votes_in(membership.fingerprint)]
    raised = yield from raise_voters(group, membership, epoch, voters)
    return promised if len(raised) >= min(membership.quorum, len(voters)) else set()


def promise(
    group: NodeGroup, membership: Membership, epoch: int, before: Reports, tickets: Mapping[int, str]
) -> Steps[set[int]]:
    """Ask nodes to promise an epoch; return those that hold the promise at one time, on their disks."""
    if epoch > MAX_EPOCH:  # tokens have no room for it
        return set()
    cfg = membership.fingerprint
    arguments = {
        node: (cfg, epoch, tickets.get(node, ""), "change" if report.next_fingerprint == cfg else "")
        for node, report in before.items()
    }
    answers = yield from group.ask_each("promise", arguments)
    promised = yield from group.synced(saying(answers, ReplyKind.PROMISED))
    told, _ = yield from group.read(promised)
    return {node for node, report in told.items() if report.still_promises(epoch, before[node])}


def raise_voters(
    group: NodeGroup, membership: Membership, epoch: int, voters: Collection[int]
) -> Steps[set[int]]:
    """Raise voters to an epoch that a majority has promised; return those that have it on their disks."""
    answers = yield from group.ask("raise", voters, membership.fingerprint, epoch)
    return (yield from group.synced(saying(answers, ReplyKind.RAISED)))


def let_vote(
    group: NodeGroup,
    script: str,
    membership: Membership,
    epoch: int,
    own: Mapping[int, tuple[str, str | int]],
) -> Steps[set[int]]:
    """OPEN nodes, each with its id and base, or ADMIT them, with ticket and seat; return those that vote."""
    cfg, members = membership.fingerprint, membership.to_json()
    answers = yield from group.ask_each(
        script, {node: (cfg, epoch, *its, members) for node, its in own.items()}
    )
    return (yield from group.synced(saying(answers, ReplyKind.OPENED, ReplyKind.ADMITTED)))
