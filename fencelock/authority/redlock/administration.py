"""What an operator asks of N nodes: initialise them, and tell how they stand. No sockets, no clock."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, Final

from fencelock import token
from fencelock._checks import check_ttl
from fencelock.authority.redlock import membership, recovery, survey
from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol.messages import Answer, Request
from fencelock.authority.redlock.recovery import Roll, Surroundings
from fencelock.authority.redlock.survey import NodeState, NodeStatus, Standing, Standings
from fencelock.authority.redlock.view import MembershipView
from fencelock.errors import AuthorityError, MembershipError, QuorumError

_MOST_RISES: Final = 3

logger = logging.getLogger("fencelock.authority.redlock")

#: Nodes that evict keys, of which this process has warned.
_warned_of_eviction: set[str] = set()


def _what_eviction_does(policy: str) -> str:
    gone = "held locks" if policy.startswith("volatile") else "held locks and the record of its tokens"
    return f"drops keys when its memory is full (maxmemory-policy {policy}): {gone} may be gone at any moment"


def warn_of_eviction(name: str, policy: str) -> None:
    """Tell, once for each node."""
    if name not in _warned_of_eviction:
        _warned_of_eviction.add(name)
        logger.warning(
            "%s %s. Type there: CONFIG SET maxmemory-policy noeviction", name, _what_eviction_does(policy)
        )


def ask(around: Surroundings, view: MembershipView) -> Generator[Request, Any, tuple[NodeStatus, ...]]:
    """Return how every node stands, in their order."""
    nodes = range(len(around.names))
    standings, answers = yield from survey.read(around.node_key, nodes, around.patience)
    found = statuses(around.names, standings, answers)
    return tuple(_with_eviction(view, node, status) for node, status in enumerate(found))


def _with_eviction(view: MembershipView, node: int, status: NodeStatus) -> NodeStatus:
    """Return how a node stands, and how it evicts keys if it does."""
    identity = view.identities.get(node)
    if identity is None or not identity.eviction:
        return status
    evicts = f"evicts keys ({identity.eviction})"
    return replace(status, detail=f"{status.detail}; {evicts}" if status.detail else evicts)


def initialise(
    around: Surroundings,
    view: MembershipView,
    *,
    base: int,
    max_ttl: float | None,
    epoch: int,
    patience: float,
    allow_eviction: bool,
) -> Generator[Request, Any, bool]:
    """Initialise blank nodes, as `Redlock.init` tells; return whether there was anything to do."""
    if max_ttl is not None:
        check_ttl(max_ttl)
    if not allow_eviction:
        yield from _check_eviction(around, view)
    try:
        _, done = yield from membership.initialise(
            around.names,
            around.node_key,
            new_word=around.new_word,
            base=base,
            max_ttl=max_ttl,
            patience=patience,
            epoch=epoch,
        )
    except QuorumError:
        view.see()  # two names of one server have a better error
        raise
    for _ in range(_MOST_RISES if epoch else 0):  # another may be at work on the same nodes
        last = token.compose(epoch - 1, token.MAX_COUNTER)
        if (yield from recovery.rise(around, last)) is not None:
            return done
    if epoch:
        raise QuorumError(
            f"too few of these nodes vote or answer to bring them to epoch {epoch}, above what the "
            "storage has seen: run the same command again; `fencelock nodes` tells how they stand"
        )
    return done


def _check_eviction(around: Surroundings, view: MembershipView) -> Generator[Request, Any, None]:
    """Refuse blank nodes that drop keys when their memory is full."""
    nodes = range(len(around.names))
    standings, _ = yield from survey.read(around.node_key, nodes, around.patience)
    for node, standing in standings.items():
        identity = view.identities.get(node)
        if identity is None or not standing.blank or identity.eviction == "":
            continue
        eviction = identity.eviction
        if eviction is None:
            logger.warning(
                "%s: its INFO does not tell whether it evicts keys: see to it that its maxmemory-policy "
                "is noeviction",
                around.names[node],
            )
            continue
        raise AuthorityError(
            f"{around.names[node]} {_what_eviction_does(eviction)}. Type there: CONFIG SET "
            "maxmemory-policy noeviction (and keep that in its configuration), or take a Redis that "
            "nothing else uses. --allow-eviction (allow_eviction=True) initialises it as it is"
        )


def statuses(
    names: tuple[str, ...], standings: Standings, answers: Mapping[int, Answer]
) -> tuple[NodeStatus, ...]:
    """Return what to tell people about each node."""
    try:
        roll = Roll.call(names, standings)
    except MembershipError:
        roll = None
    return tuple(
        _status(node, name, standings.get(node), answers[node], roll) for node, name in enumerate(names)
    )


def _status(node: int, name: str, standing: Standing | None, answer: Answer, roll: Roll | None) -> NodeStatus:
    if standing is None:
        return NodeStatus(name, NodeState.UNREACHABLE, detail=answer.detail or answer.said.value)
    if standing.closed:
        return NodeStatus(name, NodeState.CLOSED, standing.epoch, detail=_why_closed(standing))
    if roll is not None and node in roll.voters:
        return NodeStatus(name, NodeState.ADMITTED, standing.epoch)
    if roll is not None and node in roll.waiting:
        return _status_of_waiting(name, standing, roll, roll.waiting[node])
    state = NodeState.BLANK if standing.blank else NodeState.OTHER_MEMBERSHIP
    if roll is not None and standing.fingerprint == roll.membership.fingerprint:
        state = NodeState.RESTARTED
    return NodeStatus(name, state, standing.epoch, detail=_why_not(name, standing, roll))


def _status_of_waiting(name: str, standing: Standing, roll: Roll, seat: str) -> NodeStatus:
    hopeful = roll.has_quorum or roll.complete
    detail = _whose_data(standing, roll, seat) + ("waits for a client that uses it" if hopeful else _TOO_FEW)
    if standing.ticket and hopeful:
        left = standing.ticket_left
        return NodeStatus(name, NodeState.RECOVERING, standing.epoch, left, "" if left else detail)
    state = NodeState.BLANK if standing.blank else NodeState.RESTARTED
    return NodeStatus(name, state, standing.epoch, detail=detail)


_TOO_FEW = "too few nodes remember what was promised: fencelock init --after-loss"


def _addresses(members: str) -> str:
    return ", ".join(address for _, address in Membership.from_json(members).seats)


def _whose_data(standing: Standing, roll: Roll, seat: str) -> str:
    if standing.blank or standing.node_id == seat:
        return ""
    return f"has the data of {dict(roll.membership.seats).get(standing.node_id, 'another node')}; "


def _why_closed(standing: Standing) -> str:
    return f"its list gives way to {_addresses(standing.next_members)}"


def _why_not(name: str, standing: Standing, roll: Roll | None) -> str:
    if roll is None:
        return "new, or without its data" if standing.blank else "its list cannot be read by this version"
    addresses = [address for _, address in roll.membership.seats]
    members = ", ".join(addresses)
    if standing.blank or standing.fingerprint == roll.membership.fingerprint:
        why = "another has its seat" if name in addresses else f"its address is none of the list's: {members}"
        return _whose_data(standing, roll, "") + why
    return f"belongs to {_addresses(standing.members)}, and not to {members}"
