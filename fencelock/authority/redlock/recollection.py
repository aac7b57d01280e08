"""What a client remembers of the list that its nodes belong to.

A node that comes back blank says nothing about the list. When clients have admitted it again it could, but
it is asked by nobody who is not about to admit it, and the connections stay the same. So what it said
before stands until it names another list: it gets its seat back from the list that the others have, and with
it the same id. A client that let go of it would know no list any more when each node had been blank once, one
after the other, although a majority was well all the time.

That no two lists ever have a majority does not rest on what is remembered: each vote names the fingerprint of
one list, and a node of another refuses it.
"""

from __future__ import annotations

from collections import Counter

from fencelock.authority.redlock.membership import Membership
from fencelock.errors import MembershipError


class Recollection:
    """What each node has said last about the list, of those that ever named one.

    Args:
        names: addresses of the nodes that the client is configured with.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._said: dict[int, tuple[str, Membership]] = {}

    def note(self, node: int, node_id: str, membership: Membership | None) -> bool:
        """Note which list a node names, if it names one; return whether that is news."""
        if membership is None or self._said.get(node) == (node_id, membership):
            return False
        self._said[node] = node_id, membership
        return True

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
