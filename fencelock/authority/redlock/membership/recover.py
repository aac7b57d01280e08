"""How nodes that have lost their memory vote again, without an operator.

Redlock's "delayed restart" asks operators to keep a crashed node out for one ttl. Here the clients do it.
They only have to achieve this: *a node that has forgotten its work in an epoch never votes in that epoch
again*. Then no voter of an epoch has forgotten its votes in it, which the lock algorithm requires. The epoch
is the upper part of the token. `establish.py` has the steps that all procedures share. The other steps are
these, each with the schedule in `proof/spec` that it prevents:

1. BEGIN puts a ticket on the node. Without it, an ADMIT that arrives twice would let a node vote that has
   voted and forgotten in between ("no ticket"). The node chooses the ticket, because a BEGIN and an ADMIT
   that arrive twice would otherwise do the same ("client's ticket"). The ticket is bound to the server
   process, because a node that loads older data could otherwise get it back ("ticket not bound").
2. Only then the highest epoch is read, from a majority of *other* nodes that vote. The new epoch is above it,
   so that late messages of the old epoch, which no READ can see, do not matter ("no epoch").
3. ADMIT needs a ticket as old as the longest lease, by the node's own clock. So a program that runs for only
   a second can admit a node with an old ticket. The wait serves mutual exclusion only: the locks that the
   node has forgotten end meanwhile. EXTEND makes locks again if their leases go on, also on such nodes.

Closed nodes take no part in this, because a second list could vote otherwise ("recovery reads closed nodes").

If more than a minority has restarted with its data, there is no majority to read from. Then *all* nodes are
read, after each node that does not vote has its ticket. If a node forgets in between, it has another ticket,
and its report does not count ("read and BEGIN node by node"). Some node still has a promise (`p`) as high as
any epoch in which a node has voted ("no p"). If a node is blank, its promises are unknown, and an operator is
needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fencelock._backoff import spread
from fencelock.authority.redlock.membership.establish import establish, let_vote, raise_voters
from fencelock.authority.redlock.membership.reports import Census, NodeGroup, Reports
from fencelock.authority.redlock.protocol.messages import ReplyKind, Sleep, Steps
from fencelock.tokens import MAX_COUNTER, split

#: Programs that waited for one node spread their work over these seconds, or a tenth of max_ttl if less.
_SPREAD: Final = 5.0
#: Seconds to wait for another program that seems to be at work. `recover` waits for it only once, because it
#: may have died, and this program may end soon.
_COURTESY: Final = 0.5
_PAUSE: Final = 1.0  # seconds to wait after the first failure; longer after the next
_MOST_FAILURES: Final = 3


def recover(group: NodeGroup) -> Steps[bool]:
    """Admit the nodes that can be admitted again, and raise those that lag behind; wait as long as needed.

    Returns True when nothing is left to do. Returns False if too few answer, three tries failed, or an
    operator is needed.
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
            # All programs that waited for this node wake up at the same time, and one is enough.
            longest = min(_SPREAD, census.membership.max_ttl / 10)
            yield Sleep(left + spread(longest, group.jitter(), 0.0))
        elif is_courteous and _is_busy(census):
            is_courteous = False
            yield Sleep(spread(_COURTESY, group.jitter(), 0.5, 1.5))
        elif not (yield from _admit(group, census, tickets, [n for n, wait in waits.items() if wait <= 0])):
            failures += 1
            yield Sleep(spread(_PAUSE * failures, group.jitter(), 0.5, 1.5))
    return False


def rise(group: NodeGroup, token: int) -> Steps[int | None]:
    """Let the voters grant larger tokens than `token`, which a storage has seen.

    If the token is of an earlier epoch than theirs, or of theirs and not its last, nothing is changed. Else
    they move to the epoch after that of the token, so that all their tokens are larger.

    Returns the epoch in which they vote then; None if too few of them vote or could be brought there.
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
    """Bring all voters to the highest epoch among them, because the next loss may cost the quorum.

    A majority has promised this epoch, because a node already votes in it.
    """
    epochs = {node: census.reports[node].epoch or 0 for node in census.voters}
    highest = max(epochs.values(), default=0)
    behind = [node for node, epoch in epochs.items() if epoch < highest]
    if behind:
        yield from raise_voters(group, census.membership, highest, behind)


def _begin(group: NodeGroup, census: Census) -> Steps[tuple[dict[int, str], dict[int, float]]]:
    """Get a ticket on every waiting node; return the tickets, and the seconds that each node stays out."""
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
    """Return whether a voter has promised an epoch in which it does not vote: a client may be at work now."""
    voters = [census.reports[node] for node in census.voters]
    return any(report.promised > (report.epoch or 0) for report in voters)


def _admit(group: NodeGroup, census: Census, tickets: Mapping[int, str], due: Sequence[int]) -> Steps[bool]:
    """Bring the voters to a new epoch, and admit the nodes that are due; return whether all were admitted."""
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
    """Return an epoch above all in which a node may have voted, and the reports that count; None if too few.

    The reports of voters count. Without a quorum of voters, those of nodes with our tickets count, too.
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
