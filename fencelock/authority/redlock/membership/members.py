"""The list of nodes that form the quorum, as every node keeps it, and the process that answers for a node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fencelock.authority.redlock.protocol.messages import STRIPES
from fencelock.errors import MembershipError

#: Version of the protocol, number of stripes, and the hash that puts a resource into one.
_SPOKEN: Final = (1, STRIPES, "crc32")


@dataclass(frozen=True, slots=True)
class Membership:
    """The N seats, and the other facts on which all clients must agree.

    Attributes:
        seats: (id, address) of each node, sorted by id; the order in which contenders ask after a split.
        max_ttl: longest lease in seconds. A node without memory stays out as long.
        after: fingerprint of the list that this one has replaced; empty for the first.
    """

    seats: tuple[tuple[str, str], ...]
    max_ttl: float
    after: str = ""

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
        """The digest that every vote names, without addresses, because clients may know a node by several.

        It covers the previous list. So a change back to earlier nodes makes a new list, to which messages
        that are still under way mean nothing.
        """
        facts = [*_SPOKEN, round(self.max_ttl * 1000), self.after, *self.ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def to_json(self) -> str:
        facts = dict(zip(("version", "stripes", "hash"), _SPOKEN, strict=True))
        facts |= {"max_ttl_ms": round(self.max_ttl * 1000), "seats": self.seats, "after": self.after}
        return json.dumps(facts, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Membership:
        """Read what a node keeps.

        Raises:
            MembershipError: the text cannot be read, or is of another version of the protocol.
        """
        try:
            facts: dict[str, Any] = json.loads(text)
            spoken = (facts["version"], facts["stripes"], facts["hash"])
            seats = tuple(sorted((str(node_id), str(address)) for node_id, address in facts["seats"]))
            membership = cls(seats, facts["max_ttl_ms"] / 1000, str(facts["after"]))
        except (ValueError, KeyError, TypeError) as error:
            raise MembershipError(f"a node's list of members cannot be read: {text[:100]!r}") from error
        if spoken != _SPOKEN:
            raise MembershipError(
                f"the nodes speak protocol {spoken}, and this client {_SPOKEN}: use the version of fencelock "
                "that initialised them"
            )
        return membership


@dataclass(frozen=True, slots=True)
class Identity:
    """The server process that answered when a connection was opened.

    Attributes:
        run_id: random id of the server process; a restart changes it.
        replid: its replication id, if every vote must prove it again; otherwise empty.
        node_id: the node's own id, given when it was initialised; empty while it is blank.
        membership: the list that it belongs to; None while it is blank.
        eviction: the policy by which it drops keys when its memory is full; empty if it drops none; None
            if it does not tell.
    """

    run_id: str
    replid: str
    node_id: str
    membership: Membership | None
    eviction: str | None = ""

    def admitted(self, node_id: str, members: str) -> Identity:
        """Return the same server process, as a member of a list; MembershipError if it is unreadable."""
        return replace(self, node_id=node_id, membership=Membership.from_json(members))
