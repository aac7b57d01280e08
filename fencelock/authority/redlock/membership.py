"""Which nodes form the quorum: the list that every node keeps, its fingerprint, and how it comes into being.

Initialisation is explicit. Creating the marker on demand would be the very hole that the marker closes:
a node that had lost its memory would look like a new one and count from the beginning again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fencelock import token
from fencelock.authority.redlock.protocol.messages import STRIPES, Answer, Command, Request, Said
from fencelock.authority.redlock.survey import Standing, ask, read, synced
from fencelock.errors import MembershipError, QuorumError

PROTOCOL_VERSION = 1
STRIPE_HASH = "crc32"
#: Of nodes that are initialised for the first time.
DEFAULT_MAX_TTL = 60.0

_MOST_LOOKS = 3
_FIT = frozenset({Said.TICKET, Said.ADMITTED, Said.OPENED, Said.PROMISED, Said.NO_TICKET, Said.CLEARED})


@dataclass(frozen=True, slots=True)
class Membership:
    """The N seats, and what else all clients must agree on.

    Attributes:
        seats: (id, address) of each node, sorted by id; the order in which contenders ask after a split.
        max_ttl: longest lease in seconds. A node that lost its memory stays out for so long.
        after: fingerprint of the list that this one has replaced; empty for the first.
    """

    seats: tuple[tuple[str, str], ...]
    max_ttl: float
    after: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """The nodes' ids, in the fixed order."""
        return tuple(node_id for node_id, _ in self.seats)

    def seats_of(self, names: Sequence[str]) -> dict[int, str]:
        """Return the ids that the list has for these addresses, by their places; it may not have some."""
        ids = {address: node_id for node_id, address in self.seats}
        return {node: ids[name] for node, name in enumerate(names) if name in ids}

    @property
    def fingerprint(self) -> str:
        """What every vote names. Addresses are not part of it: clients may know a node by several.

        The list before is part of it: who returns to an earlier choice of nodes must not get the earlier
        list, whose messages may still be under way.
        """
        facts = [PROTOCOL_VERSION, STRIPES, STRIPE_HASH, round(self.max_ttl * 1000), self.after, *self.ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """Return the text that each node keeps."""
        return json.dumps(
            {
                "version": PROTOCOL_VERSION,
                "stripes": STRIPES,
                "hash": STRIPE_HASH,
                "max_ttl_ms": round(self.max_ttl * 1000),
                "seats": self.seats,
                "after": self.after,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Membership:
        """Read what a node keeps.

        Raises:
            MembershipError: if it was written by a version of the protocol that this one cannot join.
        """
        try:
            facts: dict[str, Any] = json.loads(text)
            spoken = (facts["version"], facts["stripes"], facts["hash"])
            seats = tuple(sorted((str(node_id), str(address)) for node_id, address in facts["seats"]))
            membership = cls(seats, facts["max_ttl_ms"] / 1000, str(facts["after"]))
        except (ValueError, KeyError, TypeError) as error:
            raise MembershipError(f"a node's list of members cannot be read: {text[:100]!r}") from error
        if spoken != (PROTOCOL_VERSION, STRIPES, STRIPE_HASH):
            raise MembershipError(
                f"the nodes speak protocol {spoken}, and this client "
                f"{(PROTOCOL_VERSION, STRIPES, STRIPE_HASH)}: use the version of fencelock that "
                "initialised them"
            )
        return membership


@dataclass(frozen=True, slots=True)
class Identity:
    """The server process that answered when a connection was opened.

    Attributes:
        run_id: random id of the server process; a restart changes it.
        replid: its replication id, where every vote must prove it again; otherwise empty.
        node_id: the node's own id, given when it was initialised; empty while it is blank.
        membership: the list that it belongs to; None while it is blank.
        eviction: the policy by which it drops keys when its memory is full; empty if it drops none; None
            where it does not tell.
    """

    run_id: str
    replid: str
    node_id: str
    membership: Membership | None
    eviction: str | None = ""

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list.

        Raises:
            MembershipError: if the list cannot be read.
        """
        return replace(self, node_id=node_id, membership=Membership.from_json(members))


def check_base(base: int) -> int:
    """Return `base` if counters can start there.

    Raises:
        ValueError: if it is negative or leaves no room for counters.
    """
    if not 0 <= base < token.MAX_COUNTER:
        raise ValueError(
            f"counters start between 0 and {token.MAX_COUNTER - 1}, and {base} does not lie there"
        )
    return base


def initialise(
    names: tuple[str, ...],
    node_key: str,
    *,
    new_word: Callable[[], str],
    base: int,
    max_ttl: float | None,
    patience: float,
    epoch: int = 0,
) -> Generator[Request, Any, tuple[Membership, bool]]:
    """Open N blank nodes, and tell whether that was still to be done.

    Without a `max_ttl`, nodes that have one keep it.

    Every node is first given a ticket, which becomes its id; whoever comes second finds the same tickets, so
    that several clients may initialise at once, and an interrupted initialisation is finished by the next
    one. A node that restarted in between has no ticket any more and is not opened: it cannot be told
    from one that has voted and forgotten.

    In epoch 0 no PROMISE is needed: there is none below that could have been promised. After a loss, the
    epoch is above those that the database has seen, and a majority promises it before any node votes. Whoever
    finds nodes that know of an epoch goes on in it, so that he may finish what another began after a loss.

    Raises:
        QuorumError: not every node answered; all of them are needed, this once.
        MembershipError: some nodes are in use already, or belong to another list.
    """
    asked = DEFAULT_MAX_TTL if max_ttl is None else max_ttl
    standing = yield from _begin(names, node_key, new_word, asked, patience)
    if max_ttl is None:
        max_ttl = max(_max_ttl_of(answer) for answer in standing.values())
    ids = {node: answer.facts[0] for node, answer in standing.items()}
    membership = Membership(tuple(sorted((ids[node], names[node]) for node in ids)), max_ttl)
    _check_agreement(names, standing, membership)
    # All at one time: the nodes in which two lists differ were then out at one time, hence a minority.
    again = yield from _begin(names, node_key, new_word, max_ttl, patience)
    for node, answer in again.items():
        if answer.facts[0] != ids[node]:
            raise _interrupted(names[node], node_key)
    _check_agreement(names, again, membership)
    blank = [node for node, answer in again.items() if answer.said is Said.TICKET]
    if blank:
        epoch = yield from _promise(names, node_key, ids, membership, epoch=epoch, patience=patience)
        yield from _open(names, node_key, ids, membership, start=(epoch, base), patience=patience)
    yield from synced(blank, patience)
    return membership, bool(blank)


def _begin(
    names: tuple[str, ...], node_key: str, new_word: Callable[[], str], max_ttl: float, patience: float
) -> Generator[Request, Any, dict[int, Answer]]:
    standing: dict[int, Answer] = {}
    for node in range(len(names)):
        begin = Command("begin", "", (node_key,), ("", new_word(), round(max_ttl * 1000), ""))
        standing[node] = yield from _need(names, node, begin, patience)
    return standing


def _max_ttl_of(answer: Answer) -> float:
    """Return the longest ttl of a node's list, or of its ticket."""
    if answer.said is Said.ADMITTED:
        return Membership.from_json(answer.facts[1]).max_ttl
    return float(answer.facts[1]) / 1000


def _promise(
    names: tuple[str, ...],
    node_key: str,
    ids: dict[int, str],
    membership: Membership,
    *,
    epoch: int,
    patience: float,
) -> Generator[Request, Any, int]:
    """Return the epoch to open nodes in: this one or the highest that any knows of; promised by a majority.

    By those, too, that another client has opened meanwhile: the blank ones may be few by now. And all at one
    time, as in a recovery; where another has been at work in between, they are asked again.
    """
    for _ in range(_MOST_LOOKS):
        before = yield from _read(names, node_key, patience)
        epoch = max(epoch, *(standing.highest for standing in before.values()))
        if not epoch:
            return epoch
        for node, node_id in ids.items():
            arguments = (membership.fingerprint, epoch, node_id, "change")
            yield from _need(names, node, Command("promise", "", (node_key,), arguments), patience)
        yield from synced(ids, patience)
        told = yield from _read(names, node_key, patience)
        if 2 * sum(told[node].still_promises(epoch, before[node]) for node in ids) > len(ids):
            return epoch
    raise QuorumError("others are at work on these nodes, or they restart: run the same command again")


def _read(
    names: tuple[str, ...], node_key: str, patience: float
) -> Generator[Request, Any, dict[int, Standing]]:
    standings, answers = yield from read(node_key, range(len(names)), patience)
    for node, name in enumerate(names):
        if node not in standings:
            raise _unfit(names, name, answers[node])
    return standings


def _open(
    names: tuple[str, ...],
    node_key: str,
    ids: dict[int, str],
    membership: Membership,
    *,
    start: tuple[int, int],
    patience: float,
) -> Generator[Request, Any, None]:
    """Open the nodes in the order of their ids, each only when those before it vote in this very list.

    Of two who initialise with lists that differ in some nodes, one then meets the other at the first node
    that they share, and gives way; in any other order each could open a majority.
    """
    for node in sorted(ids, key=ids.__getitem__):
        arguments = (membership.fingerprint, start[0], ids[node], start[1], membership.to_json())
        opened = yield from _need(names, node, Command("open", "", (node_key,), arguments), patience)
        if opened.said is Said.NO_TICKET:
            raise _interrupted(names[node], node_key)
        if Membership.from_json(opened.facts[1]).fingerprint != membership.fingerprint:
            raise MembershipError(
                f"{names[node]} has just been initialised by another client, in another list: run the same "
                "command again to see which"
            )


def _interrupted(name: str, node_key: str) -> MembershipError:
    return MembershipError(
        f"{name} restarted while it was being initialised, and is blank again. If none of these nodes has "
        f"been used, delete the key {node_key} on each, and initialise again; else add --after-loss "
        "--database URL"
    )


def remains(
    names: tuple[str, ...], node_key: str, patience: float
) -> Generator[Request, Any, dict[str, tuple[str, ...]]]:
    """Return the nodes that remember a list which has lost its majority, each with the addresses of the list.

    Empty where a majority of a list votes: nothing is lost there.

    Raises:
        QuorumError: not every node answered.
    """
    standings = yield from _read(names, node_key, patience)
    marked = {node: standing for node, standing in standings.items() if not standing.blank}
    lists = {node: Membership.from_json(standing.members) for node, standing in marked.items()}
    for known in lists.values():
        if 2 * sum(each.votes_in(known.fingerprint) for each in marked.values()) > len(known.seats):
            return {}
    return {names[node]: tuple(address for _, address in known.seats) for node, known in lists.items()}


def clear(names: tuple[str, ...], node_key: str, patience: float) -> Generator[Request, Any, int]:
    """Delete what a namespace has left on the nodes; return how many keys that were.

    Raises:
        QuorumError: not every node answered.
    """
    yield from _read(names, node_key, patience)
    count = 0
    for node in range(len(names)):
        following = ""
        while following != "0":
            command = Command("clear", "", (node_key,), ("", following or "0"))
            following, deleted = (yield from _need(names, node, command, patience)).facts
            count += int(deleted)
    return count


def _need(
    names: tuple[str, ...], node: int, command: Command, patience: float
) -> Generator[Request, Any, Answer]:
    answers = yield from ask(command, [node], patience)
    answer = answers[node]
    if answer.said not in _FIT:
        raise _unfit(names, names[node], answer)
    return answer


def _unfit(names: tuple[str, ...], name: str, answer: Answer) -> QuorumError:
    return QuorumError(
        f"to be initialised, all {len(names)} nodes must answer, and {name} is not fit: {answer}",
        nodes={name: str(answer)},
    )


def _check_agreement(names: tuple[str, ...], standing: dict[int, Answer], membership: Membership) -> None:
    for node, answer in standing.items():
        name = names[node]
        if answer.said is Said.ADMITTED:
            if answer.facts[2] == "restarted":
                raise MembershipError(
                    f"{name} was initialised before and has restarted since. It does not vote until a client "
                    "that uses it has admitted it again, which takes as long as the longest lease; "
                    "`fencelock nodes` tells when. There is nothing to initialise"
                )
            theirs = Membership.from_json(answer.facts[1])
            if theirs.ids != membership.ids:
                others = ", ".join(address for _, address in theirs.seats)
                raise MembershipError(
                    f"{name} is in use already, in another list of {len(theirs.seats)} nodes: {others}. Name "
                    "exactly those nodes; a blank one among them has lost its memory, and is not initialised "
                    "again"
                )
            if theirs.max_ttl != membership.max_ttl:
                raise MembershipError(
                    f"{name} was initialised with a longest ttl of {theirs.max_ttl:g} s, and not "
                    f"{membership.max_ttl:g} s: use the same"
                )
        elif round((its := _max_ttl_of(answer)) * 1000) != round(membership.max_ttl * 1000):
            raise MembershipError(
                f"{name} is being initialised with a longest ttl of {its:g} s, and "
                f"not {membership.max_ttl:g} s: use the same"
            )
