"""The knowledge of a client about its nodes: the server process of each, and the list that they belong to.

A node that comes back blank names no list, so its last list counts until it names another one. Otherwise a
client would know no list any more after each node was blank once, although a majority was well all the time.

This memory is not needed to keep two lists from having a majority: each vote names the fingerprint of one
list, and a node of another list refuses it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from fencelock.authority.redlock.membership.members import Identity, Membership
from fencelock.authority.redlock.protocol.attempts import NodeSet
from fencelock.errors import MembershipError


class MembershipView:
    """The last facts from each node, and the `NodeSet` that follows from them.

    It takes no lock, because a signal handler that locks may interrupt the frame that would hold it.

    Attributes:
        identities: the server process of each node that has answered.
    """

    def __init__(
        self, names: tuple[str, ...], node_key: str = "", patience: float = 1.0, init_command: str = ""
    ) -> None:
        self.identities: dict[int, Identity] = {}
        #: The nodes before any of them has named a list.
        self._node_set = NodeSet(
            names, node_key, "", tuple(range(len(names))), math.inf, patience, init_command
        )
        #: For each node that ever named a list: its id and that list.
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
        """Note which list a node names, if it names one."""
        if membership is not None:
            self._said[node] = node_id, membership

    def current(self) -> NodeSet:
        """Return the nodes as they are known now.

        Raises:
            MembershipError: two nodes are one server, or the list has another number of nodes.
        """
        seen, news = self._seen, self._news
        if seen is None or seen[0] is not news:
            seen = self._seen = news, self._look()
        return seen[1]

    def _look(self) -> NodeSet:
        self._check_distinct()
        known, names = self._membership(), self._node_set.names
        # Sorted by id, which is the same for all clients; then the others. The list has the ids for the
        # addresses, because a node that holds the data of another names the other's id.
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
            elif 2 * members >= len(names):  # a stray node does not speak for all
                raise MembershipError(
                    f"this client is configured with {len(names)} nodes ({', '.join(names)}), "
                    f"but they were initialised as {len(candidate.seats)}: {', '.join(candidate.addresses)}. "
                    "Configure every client with exactly those"
                )
        return known
