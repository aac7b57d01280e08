"""What a client knows of its nodes: which server process answers for each, and which list they belong to.

A node that comes back blank says nothing about the list. When clients have admitted it again it could, but
it is asked by nobody who is not about to admit it, and the connections stay the same. So what it said
before stands until it names another list: it gets its seat back from the list that the others have, and with
it the same id. A client that let go of it would know no list any more when each node had been blank once, one
after the other, although a majority was well all the time.

That no two lists ever have a majority does not rest on what is remembered: each vote names the fingerprint of
one list, and a node of another refuses it.
"""

from __future__ import annotations

import math
from collections import Counter

from fencelock.authority.redlock.membership import Identity, Membership
from fencelock.authority.redlock.protocol.nodeset import Fleet
from fencelock.errors import MembershipError


class MembershipView:
    """What each node has said last, and the nodes as a client sees them because of that.

    There is no lock here: a signal handler that locks may have struck whoever would hold it, and wait for the
    nodes that are met in other threads.

    Args:
        names: addresses of the nodes that the client is configured with.
        node_key: key of each node's hash.
        patience: seconds to wait for a silent node before deciding without it.
        init_command: what an operator types to initialise the nodes.

    Attributes:
        identities: the server process of each node that has answered.
    """

    def __init__(
        self, names: tuple[str, ...], node_key: str = "", patience: float = 1.0, init_command: str = ""
    ) -> None:
        self.identities: dict[int, Identity] = {}
        self._names = names
        self._node_key = node_key
        self._patience = patience
        self._init_command = init_command
        #: Of those that ever named a list: the id and that list.
        self._said: dict[int, tuple[str, Membership]] = {}
        self._news = object()
        self._seen: tuple[object, Fleet] | None = None

    def meet(self, node: int, identity: Identity) -> bool:
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

    def see(self) -> Fleet:
        """Return the nodes as they are known now.

        Raises:
            MembershipError: two of the nodes are one, or the nodes were initialised as another number.
        """
        seen, news = self._seen, self._news
        if seen is None or seen[0] is not news:
            seen = self._seen = news, self._look()
        return seen[1]

    def _look(self) -> Fleet:
        self._check_distinct()
        known = self.membership()
        return Fleet(
            names=self._names,
            node_key=self._node_key,
            fingerprint=known.fingerprint if known is not None else "",
            order=self.order(),
            max_ttl=known.max_ttl if known is not None else math.inf,
            patience=self._patience,
            init_command=self._init_command,
        )

    def _check_distinct(self) -> None:
        """Refuse two addresses of one server: it would have two votes.

        By the process only. Two servers may say the same id: one of them holds the other's data.
        """
        seen: dict[str, int] = {}
        for node, identity in list(self.identities.items()):
            other = seen.setdefault(identity.run_id, node)
            if other != node:
                raise MembershipError(
                    f"{self._names[other]} and {self._names[node]} are the same server, which "
                    "would have two votes: name each node once (databases of one server are one node)"
                )

    def membership(self) -> Membership | None:
        """Return the list of as many nodes as the client has that most of them name; None if none does.

        Raises:
            MembershipError: half of the nodes or more were initialised as another number.
        """
        lists = Counter(membership for _, membership in list(self._said.values()))
        known: Membership | None = None
        for candidate, members in lists.most_common():
            if len(candidate.seats) == len(self._names):
                known = known or candidate
            elif 2 * members >= len(self._names):  # a stray node does not speak for all
                raise MembershipError(
                    f"this client is configured with {len(self._names)} nodes ({', '.join(self._names)}), "
                    f"but they were initialised as {len(candidate.seats)}: "
                    f"{', '.join(address for _, address in candidate.seats)}. "
                    "Configure every client with exactly those"
                )
        return known

    def order(self) -> tuple[int, ...]:
        """Return the nodes in the order of their ids, which is the same for all clients; then the others.

        The list has them for the addresses: a node that holds a fellow's data says the fellow's.
        """
        known = self.membership()
        own = known.seats_of(self._names) if known is not None else {}
        ids = {node: own.get(node, said) for node, (said, _) in list(self._said.items())}
        return tuple(sorted(range(len(self._names)), key=lambda node: (ids.get(node, "~"), node)))
