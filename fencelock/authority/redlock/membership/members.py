"""The list of nodes that form the quorum, as every node stores it, and a client's view of the nodes."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fencelock.authority.redlock.protocol.attempts import NodeSet
from fencelock.authority.redlock.protocol.messages import STRIPES
from fencelock.errors import MembershipError

#: Version of the protocol, number of stripes, and the hash that maps a resource to a stripe.
_SPOKEN: Final = (1, STRIPES, "crc32")


@dataclass(frozen=True, slots=True)
class Membership:
    """The N seats, and the other facts on which all clients must agree."""

    #: (id, address) of each node, sorted by id; the order in which contenders ask after a split.
    seats: tuple[tuple[str, str], ...]
    max_ttl: float  # longest lease in seconds. A node that lost its memory stays out for this time.
    after: str = ""  # fingerprint of the list that this one has replaced; empty for the first

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(node_id for node_id, _ in self.seats)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for _, address in self.seats)

    @property
    def quorum(self) -> int:
        return len(self.seats) // 2 + 1

    def seats_of(self, names: Sequence[str]) -> dict[int, str]:
        """Return the ids of these addresses in the list, by index; unknown addresses are left out."""
        ids = {address: node_id for node_id, address in self.seats}
        return {node: ids[name] for node, name in enumerate(names) if name in ids}

    @property
    def fingerprint(self) -> str:
        """The digest that commands name, without addresses, because clients may use different ones.

        It covers the previous list. So a change back to earlier nodes makes a new fingerprint, and messages
        of the earlier list have no effect.
        """
        facts = [*_SPOKEN, round(self.max_ttl * 1000), self.after, *self.ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        facts = dict(zip(("version", "stripes", "hash"), _SPOKEN, strict=True))
        facts |= {"max_ttl_ms": round(self.max_ttl * 1000), "seats": self.seats, "after": self.after}
        return json.dumps(facts, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Membership:
        """Return the membership that `to_json` has written; MembershipError for any other text."""
        try:
            facts: dict[str, Any] = json.loads(text)
            spoken = (facts["version"], facts["stripes"], facts["hash"])
            seats = tuple(sorted((str(node_id), str(address)) for node_id, address in facts["seats"]))
            membership = cls(seats, facts["max_ttl_ms"] / 1000, str(facts["after"]))
        except (ValueError, KeyError, TypeError) as error:
            raise MembershipError(f"a node's list of members cannot be read: {text[:100]!r}") from error
        if spoken != _SPOKEN:
            raise MembershipError(
                f"the nodes speak protocol {spoken}, and this client speaks {_SPOKEN}: use the version of "
                "fencelock that initialised them"
            )
        return membership


@dataclass(frozen=True, slots=True)
class Identity:
    """The server process that answered when a connection was opened."""

    run_id: str  # random id of the server process; a restart changes it
    replid: str  # its replication id, if every vote must prove it again; otherwise empty
    node_id: str  # the node's own id, given when it was initialised; empty while it is blank
    membership: Membership | None  # the list that it belongs to; None while it is blank
    #: The policy by which it drops keys when its memory is full; empty if it drops none, None if unknown.
    eviction: str | None = ""

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list; MembershipError if that is unreadable."""
        return replace(self, node_id=node_id, membership=Membership.from_json(members))


class MembershipView:
    """The last facts from each node, and the `NodeSet` that follows from them.

    A node that comes back blank names no list, so its last list counts until it names another one. Otherwise
    a client would know no list any more after each node was blank once, although a majority was well all the
    time. This memory is not needed to keep two lists from having a majority: each command names the
    fingerprint of one list, and a node of another list refuses it.

    It has no mutex, because a signal handler that acquires a lock may interrupt the frame that holds it.
    """

    def __init__(
        self, names: tuple[str, ...], node_key: str = "", patience: float = 1.0, init_command: str = ""
    ) -> None:
        self.identities: dict[int, Identity] = {}  # the server process of each node that has answered
        #: The nodes before any of them has named a list.
        self._node_set = NodeSet(
            names, node_key, "", tuple(range(len(names))), math.inf, patience, init_command
        )
        #: For each node that ever named a list: its id, and the list that it named last.
        self._said: dict[int, tuple[str, Membership]] = {}
        self._news = object()
        self._seen: tuple[object, NodeSet] | None = None

    def on_identity(self, node: int, identity: Identity) -> bool:
        """Note which server process answers for a node; return whether that is news."""
        if self.identities.get(node) == identity:
            return False
        self.identities[node] = identity
        self.note(node, identity.node_id, identity.membership)
        self._news = object()
        return True

    def note(self, node: int, node_id: str, membership: Membership | None) -> None:
        if membership is not None:
            self._said[node] = node_id, membership

    def current(self) -> NodeSet:
        """Return the nodes as known now; raise MembershipError if their list or their servers do not fit."""
        seen, news = self._seen, self._news
        if seen is None or seen[0] is not news:
            seen = self._seen = news, self._look()
        return seen[1]

    def _look(self) -> NodeSet:
        self._check_distinct()
        known, names = self._membership(), self._node_set.names
        # Sorted by id, which is the same for all clients; nodes without an id come last. The ids are those of
        # the addresses in the list, because a node with the data of another node names the other's id.
        own = known.seats_of(names) if known is not None else {}
        ids = {node: own.get(node, said) for node, (said, _) in list(self._said.items())}
        order = tuple(sorted(range(len(names)), key=lambda node: (ids.get(node, "~"), node)))
        if known is None:
            return replace(self._node_set, order=order)
        return replace(self._node_set, fingerprint=known.fingerprint, order=order, max_ttl=known.max_ttl)

    def _check_distinct(self) -> None:
        """Raise MembershipError for two addresses of one server process, because it would have two votes.

        Two servers may name the same id, if one holds the other's data.
        """
        seen: dict[str, int] = {}
        for node, identity in list(self.identities.items()):
            other = seen.setdefault(identity.run_id, node)
            if other != node:
                names = self._node_set.names
                raise MembershipError(
                    f"{names[other]} and {names[node]} are the same server, which "
                    "would have two votes: name each node once (databases of one server are one node)"
                )

    def _membership(self) -> Membership | None:
        """Return the most named list that has as many nodes as the client; None if there is none."""
        names = self._node_set.names
        lists = Counter(membership for _, membership in list(self._said.values()))
        known: Membership | None = None
        for candidate, members in lists.most_common():
            if len(candidate.seats) == len(names):
                known = known or candidate
            elif 2 * members >= len(names):  # fewer nodes than half may be in another list
                raise MembershipError(
                    f"this client is configured with {len(names)} nodes ({', '.join(names)}), "
                    f"but they were initialised as {len(candidate.seats)}: {', '.join(candidate.addresses)}. "
                    "Configure every client with exactly those"
                )
        return known
