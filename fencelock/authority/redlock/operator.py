"""What an operator does to nodes that are in use: letting others take their place."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from fencelock.authority.redlock.change import Change, Plan, change
from fencelock.authority.redlock.transport.blocking import SharedConnections
from fencelock.authority.redlock.transport.connector import Node
from fencelock.authority.stepped import block

_CONNECT_TIMEOUT = 3.0


def change_nodes(
    present: Sequence[str],
    wanted: Sequence[str],
    *,
    namespace: str = "fencelock",
    tell: Callable[[str], None] = lambda _: None,
    patience: float = _CONNECT_TIMEOUT,
) -> Change:
    """Let the wanted nodes vote instead of the present ones; some may be the same.

    No lock is granted meanwhile; leases that are held come to their end before others are granted. May be run
    again after an interruption, with the same arguments.

    Args:
        present: URLs of the nodes in use. Those that are gone for good may be among them, or left out.
        wanted: URLs of the nodes that are to be in use afterwards.
        namespace: prefix of every key on the nodes.
        tell: told what is going on, as sentences.
        patience: seconds to wait for a node.

    Raises:
        QuorumError: too few of the present nodes vote, or a wanted one does not answer.
        MembershipError: a wanted node is in use elsewhere, or another change is under way.
        ValueError: for a URL that cannot be understood, or a wanted node that is named twice.
    """
    nodes: dict[str, Node] = {}
    names = []
    for url in (*present, *wanted):
        node = Node(url, patience, verify_votes=False)
        nodes.setdefault(node.name, node)
        names.append(node.name)
    wanted_names = names[len(present) :]
    for name in wanted_names:
        if wanted_names.count(name) > 1:
            raise ValueError(f"{name} is named {wanted_names.count(name)} times: each node has one vote")
    everybody = tuple(nodes)
    plan = Plan(
        names=everybody,
        wanted=tuple(everybody.index(name) for name in wanted_names),
        node_key=f"{{{namespace}}}",
        patience=patience,
        new_word=lambda: secrets.token_hex(16),
        tell=tell,
    )

    connections = SharedConnections(
        list(nodes.values()),
        plan.node_key,
        on_identity=lambda _node, _identity: None,
        is_wanted=lambda _nonce: True,
        on_trouble=lambda: None,
        connect_timeout=patience,
        patience=patience,
    )
    try:
        return block(change(plan), connections.do)
    finally:
        connections.close()
