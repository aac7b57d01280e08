"""How nodes that have lost their memory vote again, without anything that an operator must do.

Redlock's "delayed restart" asks operators to keep a crashed node out for one ttl. Here the clients do it.
They have to achieve this only: *a node that has forgotten what it did in an epoch never votes in that epoch
again*. Within an epoch then no node forgets, and the lock core is right; and the epoch is the upper half of
the token. `establish.py` has the steps that all procedures share. The others, and the schedule in
`proof/spec` that each prevents:

1. BEGIN puts a ticket on the node. Without it, an ADMIT that is delivered again would let a node vote again
   that has voted since and forgotten ("no ticket"). The node makes it up, else a BEGIN and an ADMIT would do
   the same ("client's ticket"). It is bound to the server process, else a node could fall back to a state in
   which the ticket stood ("ticket not bound").
2. Only then the highest epoch is read, from a majority of *other* nodes that vote. The new one is above it:
   messages in flight in the old one, which could be copied at no moment, no longer matter ("no epoch").
3. ADMIT needs the ticket, as old as the longest lease by the node's own clock: so a program that lives for a
   second can admit it later. The wait serves mutual exclusion only: the locks that the node has forgotten end
   meanwhile. EXTEND makes those of leases that go on again, also on nodes that wait to be admitted.

Closed nodes take part in none of this, else a second list would vote ("recovery reads closed nodes").

Where more than a minority has restarted with its data, there is no majority to read from. Then *all* nodes
are read, after each that does not vote has its ticket: one that forgets between the two has another ticket,
and the reading is void ("read and BEGIN node by node"). Some node still holds `p` as high as any ever voted
("no p"). With a blank node among them it is unknown what that has promised, and an operator is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fencelock.authority.redlock.membership.establish import establish, let_vote, raise_voters
from fencelock.authority.redlock.membership.reports import Census, NodeGroup, Reports, Steps
from fencelock.authority.redlock.protocol.messages import ReplyKind, Sleep
from fencelock.tokens import MAX_COUNTER, split

#: Recoverers that have waited for one node spread their work over so many seconds, or a tenth of the wait.
_SPREAD: Final = 5.0
#: Seconds that another recoverer is given, once, that has promised an epoch and seems to be at work. It may
#: have died, and this one may live for a second only.
_COURTESY: Final = 0.5
#: Seconds after a first failure; longer after the next.
_PAUSE: Final = 1.0
_MOST_FAILURES: Final = 3


def recover(group: NodeGroup) -> Steps[bool]:
    """Admit nodes again that can be, and raise those that lag behind; wait as long as that takes.

    Returns True when nothing is left to do, False when nothing can be done for now: too few nodes answer, or
    an operator is needed.
    """
    is_courteous, failures = True, 0
    while failures < _MOST_FAILURES:
        reports, _ = yield from group.read()
        census = Census.of(group.names, reports)
        if census is None or len(census.membership.seats) != len(group.names):
            return False
        yield from _raise_laggards(group, census)
        if not census.waiting:
            return True
        if not census.has_quorum and not census.complete:
            return False
        tickets, waits = yield from _begin(group, census)
        left = (min if census.has_quorum else max)(waits.values(), default=0.0)
        if left > 0:
            # All that have waited for this node wake up at the same time, and one of us is enough.
            spread = min(_SPREAD, census.membership.max_ttl / 10)
            yield Sleep(left + spread * group.jitter())
        elif is_courteous and _is_busy(census):
            is_courteous = False
            yield Sleep(_COURTESY * (0.5 + group.jitter()))
        elif not (yield from _admit(group, census, tickets, [n for n, wait in waits.items() if wait <= 0])):
            failures += 1
            yield Sleep(_PAUSE * failures * (0.5 + group.jitter()))
    return False


def rise(group: NodeGroup, token: int) -> Steps[int | None]:
    """Bring the voters to where they can grant larger tokens than one that a storage has seen.

    The nodes have forgotten that they granted it. Where it is of their own epoch or an earlier one, a larger
    counter will do, or any. Where it is of a later one, or the last of theirs, they go beyond its epoch, and
    so beyond all that was granted in it.

    Returns the epoch in which they vote then; None where too few of them do.
    """
    reports, _ = yield from group.read()
    census = Census.of(group.names, reports)
    if census is None or not census.has_quorum:
        return None
    voters = {node: reports[node] for node in census.voters}
    epochs = sorted((report.epoch or 0 for report in voters.values()), reverse=True)
    present = epochs[census.membership.quorum - 1]  # a majority votes in it, or in a later one
    epoch, counter = split(token)
    if epoch < present or (epoch == present and counter < MAX_COUNTER):
        return present
    promised = yield from establish(group, census.membership, epoch + 1, voters, {})
    return epoch + 1 if len(promised) >= census.membership.quorum else None


def _raise_laggards(group: NodeGroup, census: Census) -> Steps[None]:
    """Bring voters of lower epochs to the highest in which any votes; else the next loss costs the quorum.

    That a node votes in it shows that a majority has promised it.
    """
    epochs = {node: census.reports[node].epoch or 0 for node in census.voters}
    highest = max(epochs.values(), default=0)
    behind = [node for node, epoch in epochs.items() if epoch < highest]
    if behind:
        yield from raise_voters(group, census.membership, highest, behind)


def _begin(group: NodeGroup, census: Census) -> Steps[tuple[dict[int, str], dict[int, float]]]:
    """Get a ticket on every node that waits; return them, and for how many seconds each still stays out."""
    fingerprint, max_ttl_ms = census.membership.fingerprint, round(census.membership.max_ttl * 1000)
    arguments = {
        node: (fingerprint, group.new_word(), max_ttl_ms, census.reports[node].node_id or seat)
        for node, seat in census.waiting.items()
    }
    answers = yield from group.ask_each("begin", arguments)
    given = {node: answer.facts for node, answer in answers.items() if answer.kind is ReplyKind.TICKET}
    tickets = {node: ticket for node, (ticket, _, _) in given.items()}
    return tickets, {node: int(left_ms) / 1000 for node, (_, _, left_ms) in given.items()}


def _is_busy(census: Census) -> bool:
    """Whether a node has promised an epoch in which none votes yet: a client may be at work just now."""
    voters = [census.reports[node] for node in census.voters]
    return any(report.promised > (report.epoch or 0) for report in voters)


def _admit(group: NodeGroup, census: Census, tickets: Mapping[int, str], due: Sequence[int]) -> Steps[bool]:
    """Bring the voters to a new epoch, and admit to it the nodes that are due; tell if all is done."""
    membership = census.membership
    chosen = yield from _choose_epoch(group, census, tickets)
    if chosen is None or not due:
        return False
    epoch, before = chosen
    promised = yield from establish(group, membership, epoch, before, tickets)
    if len(promised) < membership.quorum:
        return False
    nodes = {node: (tickets[node], census.waiting[node]) for node in due}
    return len((yield from let_vote(group, "admit", membership, epoch, nodes))) == len(nodes)


def _choose_epoch(
    group: NodeGroup, census: Census, tickets: Mapping[int, str]
) -> Steps[tuple[int, Reports] | None]:
    """Return an epoch above all that can have been voted in, and the nodes asked; None where too few know.

    A node counts that votes, or where too few do, one that is held by our ticket.
    """
    asked, enough = [*census.voters], census.membership.quorum
    if not census.has_quorum:
        asked, enough = [*census.voters, *tickets], len(group.names)
    reports, _ = yield from group.read(asked)
    counted = {
        node: report
        for node, report in reports.items()
        if report.fingerprint == census.membership.fingerprint
        and not report.closed
        and (report.admitted or (not census.has_quorum and report.ticket == tickets.get(node)))
    }
    if len(counted) < enough:
        return None
    return max(report.highest for report in counted.values()) + 1, counted
