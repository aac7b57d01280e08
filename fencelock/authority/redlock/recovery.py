"""How nodes that have lost their memory vote again, without anybody's doing anything by hand.

Pure, as the protocol is: generators that yield requests. `recoverer.py` runs them in the background.

Redlock's "delayed restart" asks operators to keep a crashed node out for one ttl. Here the clients do it.
All that has to be achieved is this: *a node that has forgotten what it did in an epoch never votes in that
epoch again*. Within an epoch then nobody forgets, and the lock core is right; and the epoch is the upper
half of the token. `spec/` has the whole as a model, with the schedules that each step prevents:

1. BEGIN puts a ticket on the node, which the node makes up itself and which is bound to its server process.
   Without it, an ADMIT that is delivered again would let a node vote anew that has voted since and
   forgotten ("no ticket"); with one that the client makes up, so would a BEGIN and an ADMIT ("client's
   ticket"); with one that is not bound, a node that falls back to a state in which the ticket stood
   ("ticket not bound").
2. Only then the highest epoch is read, from a majority of *other* nodes that vote. The new one is above it:
   what is in flight in the old one, and could be copied at no moment, no longer matters ("no epoch").
3. PROMISE on a majority, and only then RAISE. Otherwise the one node that had been raised may forget, and a
   second recoverer chooses the same epoch ("RAISE without PROMISE": it takes five nodes to see). When all of
   them have promised, a second look: none has forgotten that, and been admitted by one that has read from
   the others before they promised ("one look at promises").
4. RAISE before ADMIT, on a majority. A server that has taken over the address of another which still lives,
   cut off, must not leave that one with a majority in the old epoch ("ADMIT before RAISE").
5. ADMIT, with the ticket, and not before that is as old as the longest lease. The node itself measures that,
   and refuses before: so whoever comes afterwards admits it at once, also a program that lives for a second.
   The wait serves mutual exclusion only: the locks that the node has forgotten end meanwhile. Those of leases
   that go on are made again by EXTEND, as on every node that is to be admitted: so the next node may forget
   at once, and nobody who waits has taken such a lock here.

Nodes that are closed take part in none of this ("recovery reads closed nodes": a second list would vote).

When more than a minority has restarted with its data, there is no majority to read from. Then *all* nodes
are read, after each of those that do not vote has its ticket: one that forgets between the two has another
ticket, and the reading is void ("read and BEGIN node by node"). Some node still holds `p` as high as
anybody ever voted ("no p"). Whoever votes is raised before anybody is admitted ("all restarted, no RAISE").
With a blank node among them it is unknown what that has promised, and an operator is needed.

A node may hold the data of a fellow node, which it has followed, or whose file it was started with, and then
names itself as that one. It has lost its own memory, as a blank one has: where all are read, each memory
counts once. And it gets the seat of its address: what it names itself is a word about its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol.messages import Command, Request, Said, Sleep
from fencelock.authority.redlock.survey import (
    Standing,
    Standings,
    ask,
    nodes_saying,
    read,
    synced,
)
from fencelock.token import MAX_COUNTER, MAX_EPOCH, split

#: Recoverers that have waited for one node spread their work over so many seconds, or a tenth of the wait.
_SPREAD = 5.0
#: Seconds that another recoverer is given, once, that has promised an epoch and seems to be at work. It may
#: have died, and this one may live for a second only.
_COURTESY = 0.5
#: Seconds after a first failure; longer after the next.
_PAUSE = 1.0
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a recoverer knows before it looks.

    Attributes:
        names: the nodes' addresses.
        node_key: key of each node's hash.
        patience: seconds to wait for a node.
        new_word: makes a random word, for tickets.
        jitter: returns a random number between 0 and 1.
    """

    names: tuple[str, ...]
    node_key: str
    patience: float
    new_word: Callable[[], str]
    jitter: Callable[[], float]

    def command(self, script: str, *arguments: str | int) -> Command:
        """Return a command that concerns no lock."""
        return Command(script, "", (self.node_key,), arguments)


@dataclass(frozen=True, slots=True)
class Roll:
    """The list that most nodes belong to, and how its members stand.

    Attributes:
        membership: the list.
        standings: what every node that answered said about itself.
        voters: members that vote.
        waiting: members that do not and can be admitted, with the id of the seat that each gets back.
        complete: whether every node of the client answered, holds its own data of this list and is open.
    """

    membership: Membership
    standings: Standings
    voters: frozenset[int]
    waiting: Mapping[int, str]
    complete: bool

    @classmethod
    def call(cls, names: tuple[str, ...], standings: Standings) -> Roll | None:
        """Return the roll of the list that most nodes name; None where no node names one.

        A node gets the seat back that the list has for its address; at an address that the list does not
        have, the one that it names itself. A blank node names none: a stranger in its place, admitted by the
        mistake of one client, would be one voter more than the others know of.
        """
        marked = [standing for standing in standings.values() if not standing.blank]
        lists = Counter(s.fingerprint for s in marked if not s.closed) or Counter(
            s.fingerprint for s in marked
        )
        if not lists:
            return None
        fingerprint = lists.most_common(1)[0][0]
        texts = Counter(standing.members for standing in marked if standing.fingerprint == fingerprint)
        membership = Membership.from_json(texts.most_common(1)[0][0])
        own = membership.seats_of(names)
        seats = {node: own.get(node, standing.node_id) for node, standing in standings.items()}
        taken = {seats[node] for node, standing in standings.items() if standing.admitted or standing.closed}
        waiting = {}
        for node in sorted(seats, key=lambda node: node not in own):  # whose address the list has come first
            standing, seat = standings[node], seats[node]
            if standing.admitted or standing.closed or seat in taken:
                continue
            if standing.held_for(seat) in membership.ids:
                waiting[node] = seat
                taken.add(seat)
        known = [
            standing for standing in marked if standing.fingerprint == fingerprint and not standing.closed
        ]
        return cls(
            membership,
            standings,
            frozenset(node for node, standing in standings.items() if standing.votes_in(fingerprint)),
            waiting,
            complete=len({standing.node_id for standing in known}) == len(names) == len(membership.seats),
        )

    @property
    def quorum(self) -> int:
        """How many members are a majority."""
        return len(self.membership.seats) // 2 + 1

    @property
    def has_quorum(self) -> bool:
        """Whether a majority votes."""
        return len(self.voters) >= self.quorum

    def answers_for(self, node: int, standing: Standing, tickets: Mapping[int, str]) -> bool:
        """Whether what a node says counts for the choice of an epoch: it votes, or is held by our ticket."""
        if standing.votes_in(self.membership.fingerprint):
            return True
        held = not standing.blank and not standing.admitted and not standing.closed
        ours = standing.ticket != "" and standing.ticket == tickets.get(node)
        return not self.has_quorum and held and ours and standing.fingerprint == self.membership.fingerprint


def recover(around: Surroundings) -> Generator[Request, Any, bool]:
    """Admit again whoever can be, and raise whoever lags behind; wait as long as that takes.

    Returns True when nothing is left to do, False when nothing can be done for now: too few nodes answer, or
    an operator is needed.

    Args:
        around: where to look.
    """
    is_courteous, failures = True, 0
    while failures < _MOST_FAILURES:
        standings, _ = yield from read(around.node_key, range(len(around.names)), around.patience)
        roll = Roll.call(around.names, standings)
        if roll is None or len(roll.membership.seats) != len(around.names):
            return False
        yield from _raise_laggards(around, roll)
        if not roll.waiting:
            return True
        if not roll.has_quorum and not roll.complete:
            return False
        tickets, waits = yield from _begin(around, roll)
        left = (min if roll.has_quorum else max)(waits.values(), default=0.0)
        if left > 0:
            # Whoever else has waited for this node wakes up at the same time: one of us is enough.
            spread = min(_SPREAD, roll.membership.max_ttl / 10)
            yield Sleep(left + spread * around.jitter())
        elif is_courteous and _is_busy(roll):
            is_courteous = False
            yield Sleep(_COURTESY * (0.5 + around.jitter()))
        elif not (yield from _admit(around, roll, tickets, [n for n, wait in waits.items() if wait <= 0])):
            failures += 1
            yield Sleep(_PAUSE * failures * (0.5 + around.jitter()))
    return False


def _raise_laggards(around: Surroundings, roll: Roll) -> Generator[Request, Any, None]:
    """Bring voters of lower epochs to the highest in which any votes; else the next loss costs the quorum.

    That a node votes in it shows that a majority has promised it.
    """
    epochs = {node: roll.standings[node].epoch or 0 for node in roll.voters}
    highest = max(epochs.values(), default=0)
    behind = [node for node, epoch in epochs.items() if epoch < highest]
    if behind:
        yield from _raise(around, roll, highest, behind)


def rise(around: Surroundings, token: int) -> Generator[Request, Any, int | None]:
    """Bring the voters to where they can grant larger tokens than one that a storage has seen.

    The nodes have forgotten that they granted it. Where it is of their own epoch or an earlier one, nothing
    is to be done: a larger counter will do, or any. Where it is of a later one, or the last of theirs, they
    go beyond its epoch, and so beyond all that was granted in it: PROMISE first, then RAISE, as always.

    Returns the epoch in which they vote then; None where too few of them do.
    """
    standings, _ = yield from read(around.node_key, range(len(around.names)), around.patience)
    roll = Roll.call(around.names, standings)
    if roll is None or not roll.has_quorum:
        return None
    voters = {node: roll.standings[node] for node in roll.voters}
    epochs = sorted((standing.epoch or 0 for standing in voters.values()), reverse=True)
    present = epochs[roll.quorum - 1]  # a majority votes in it, or in a later one
    epoch, counter = split(token)
    if epoch < present or (epoch == present and counter < MAX_COUNTER):
        return present
    following = epoch + 1
    if following > MAX_EPOCH:
        return None
    promised = yield from _promise(around, roll, following, {}, voters)
    if len(promised) < roll.quorum:
        return None
    raised = yield from _raise(around, roll, following, voters)
    return following if len(raised) >= roll.quorum else None


def _raise(
    around: Surroundings, roll: Roll, epoch: int, nodes: Iterable[int]
) -> Generator[Request, Any, set[int]]:
    """Have voters vote in an epoch that a majority has promised; return those that have it on their disks."""
    command = around.command("raise", roll.membership.fingerprint, epoch)
    answers = yield from ask(command, nodes, around.patience)
    return (yield from synced(nodes_saying(answers, Said.RAISED), around.patience))


def _begin(
    around: Surroundings, roll: Roll
) -> Generator[Request, Any, tuple[dict[int, str], dict[int, float]]]:
    """Get a ticket on every node that waits; return them, and for how many seconds each still stays out."""
    max_ttl_ms = round(roll.membership.max_ttl * 1000)
    tickets: dict[int, str] = {}
    waits: dict[int, float] = {}
    for node, seat in roll.waiting.items():
        word, held = around.new_word(), roll.standings[node].held_for(seat)
        command = around.command("begin", roll.membership.fingerprint, word, max_ttl_ms, held)
        answers = yield from ask(command, [node], around.patience)
        if answers[node].said is Said.TICKET:
            tickets[node], _, left_ms = answers[node].facts
            waits[node] = int(left_ms) / 1000
    return tickets, waits


def _is_busy(roll: Roll) -> bool:
    """Whether a node has promised an epoch in which none votes yet: a client may be at work just now."""
    return any(roll.standings[node].promised > (roll.standings[node].epoch or 0) for node in roll.voters)


def _admit(
    around: Surroundings, roll: Roll, tickets: Mapping[int, str], due: Sequence[int]
) -> Generator[Request, Any, bool]:
    """Choose an epoch, have it promised, raise the voters, admit what is due; tell if all is done."""
    chosen = yield from _choose_epoch(around, roll, tickets)
    if chosen is None or not due:
        return False
    epoch, standings = chosen
    promised = yield from _promise(around, roll, epoch, tickets, standings)
    if len(promised) < roll.quorum:
        return False
    voters = [node for node, standing in standings.items() if standing.admitted]
    raised = yield from _raise(around, roll, epoch, voters)
    if len(raised) < (roll.quorum if roll.has_quorum else len(voters)):
        return False
    return (yield from _let_in(around, roll, epoch, {node: tickets[node] for node in due}))


def _choose_epoch(
    around: Surroundings, roll: Roll, tickets: Mapping[int, str]
) -> Generator[Request, Any, tuple[int, Standings] | None]:
    """Return an epoch above all that can have been voted in, and the nodes asked; None where too few know."""
    asked = [*roll.voters, *(() if roll.has_quorum else tickets)]
    standings, _ = yield from read(around.node_key, asked, around.patience)
    counted = {n: s for n, s in standings.items() if roll.answers_for(n, s, tickets)}
    if len(counted) < (roll.quorum if roll.has_quorum else len(around.names)):
        return None
    epoch = max(standing.highest for standing in counted.values()) + 1
    return (epoch, counted) if epoch <= MAX_EPOCH else None


def _promise(
    around: Surroundings, roll: Roll, epoch: int, tickets: Mapping[int, str], standings: Standings
) -> Generator[Request, Any, set[int]]:
    """Have nodes promise the epoch; return those that have it on their disks, and all at the same time."""
    fingerprint = roll.membership.fingerprint
    voters = [node for node, standing in standings.items() if standing.admitted]
    answers = yield from ask(around.command("promise", fingerprint, epoch, "", ""), voters, around.patience)
    promised = nodes_saying(answers, Said.PROMISED)
    for node in standings.keys() - set(voters):
        command = around.command("promise", fingerprint, epoch, tickets[node], "")
        answers = yield from ask(command, [node], around.patience)
        promised |= nodes_saying(answers, Said.PROMISED)
    promised = yield from synced(promised, around.patience)
    told, _ = yield from read(around.node_key, promised, around.patience)
    return {
        node
        for node, standing in told.items()
        if roll.answers_for(node, standing, tickets) and standing.still_promises(epoch, standings[node])
    }


def _let_in(
    around: Surroundings, roll: Roll, epoch: int, tickets: Mapping[int, str]
) -> Generator[Request, Any, bool]:
    """ADMIT; tell whether all nodes vote now."""
    admitted = set()
    for node, ticket in tickets.items():
        text = roll.membership.to_json()
        command = around.command(
            "admit", roll.membership.fingerprint, epoch, ticket, roll.waiting[node], text
        )
        answers = yield from ask(command, [node], around.patience)
        admitted |= nodes_saying(answers, Said.ADMITTED)
    yield from synced(admitted, around.patience)
    return len(admitted) == len(tickets)
