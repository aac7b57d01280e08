"""Operations of an operator: initialise the nodes, show their status, replace them by others."""

from __future__ import annotations

import enum
import logging
import random
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from fencelock._checks import check_ttl
from fencelock._generators import run
from fencelock.authority.redlock.membership import initialise as initialising
from fencelock.authority.redlock.membership.change import Change, addresses_of, change
from fencelock.authority.redlock.membership.members import Membership, MembershipView
from fencelock.authority.redlock.membership.recover import rise
from fencelock.authority.redlock.membership.reports import Census, NodeGroup, NodeReport, Reports
from fencelock.authority.redlock.protocol.messages import NodeReplies, Steps
from fencelock.authority.redlock.transport.blocking import SharedConnections
from fencelock.authority.redlock.transport.connector import Node
from fencelock.errors import AuthorityError, MembershipError, QuorumError
from fencelock.tokens import MAX_COUNTER, compose

_CONNECT_TIMEOUT: Final = 3.0
_AGAINST_EVICTION: Final = (
    "Run there: CONFIG SET maxmemory-policy noeviction (and keep that in its configuration). If CONFIG is "
    "not allowed, set it in the provider's parameter group"
)
_MOST_RISES: Final = 3

logger: logging.Logger = logging.getLogger("fencelock.authority.redlock")

_warned_of_eviction: set[str] = set()  # nodes that evict keys, of which this process has warned


class NodeState(enum.Enum):
    """The state of a node at the moment: only an admitted node votes."""

    ADMITTED = "admitted"
    RECOVERING = "recovering"
    BLANK = "blank"
    RESTARTED = "restarted"
    UNREACHABLE = "unreachable"
    OTHER_MEMBERSHIP = "other membership"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The status of one node, for `Redlock.status()` and `fencelock nodes`.

    Attributes:
        address: the address, without password.
        state: admitted nodes vote; the others do not, or not in this list.
        epoch: the epoch in which the node votes, or voted last; None if there is none, or it is unknown.
        max_ttl: the longest lease in seconds that its list allows; None if unknown.
        recovering_for: seconds until it can be admitted again, at the earliest; None unless recovering.
        detail: a text for a person; may be empty.
    """

    address: str
    state: NodeState
    epoch: int | None = None
    max_ttl: float | None = None
    recovering_for: float | None = None
    detail: str = ""


def group_of(names: tuple[str, ...], node_key: str, patience: float) -> NodeGroup:
    return NodeGroup(names, node_key, patience, lambda: secrets.token_hex(16), random.random)


def initialise(
    group: NodeGroup,
    view: MembershipView,
    *,
    base: int,
    max_ttl: float | None,
    epoch: int,
    allow_eviction: bool,
) -> Steps[bool]:
    """Initialise blank nodes: see `Redlock.init`; return False if they were initialised before."""
    if not 0 <= base < MAX_COUNTER:
        raise ValueError(f"counters start from a number between 0 and {MAX_COUNTER - 1}, not from {base}")
    if max_ttl is not None:
        check_ttl(max_ttl)
    if not allow_eviction:
        yield from _check_eviction(group, view)
    try:
        done = yield from initialising.initialise(group, base=base, max_ttl=max_ttl, epoch=epoch)
    except QuorumError:
        view.current()  # raises a better error for two names of one server
        raise
    for _ in range(_MOST_RISES if epoch else 0):  # another client may be at work on the same nodes
        last = compose(epoch - 1, MAX_COUNTER)
        if (yield from rise(group, last)) is not None:
            return done
    if epoch:
        raise QuorumError(
            f"too few of these nodes vote or answer, so they could not be brought to epoch {epoch}, whose "
            "tokens are above all that the storage has seen: run the same command again; `fencelock nodes` "
            "shows their state"
        )
    return done


def _check_eviction(group: NodeGroup, view: MembershipView) -> Steps[None]:
    """Raise AuthorityError for a blank node that drops keys when its memory is full; warn if unknown."""
    reports, _ = yield from group.read()
    for node, report in reports.items():
        name, identity = group.names[node], view.identities.get(node)
        if identity is None or not report.blank or identity.eviction == "":
            continue
        if identity.eviction is not None:
            raise AuthorityError(
                f"{name} {_what_eviction_does(identity.eviction)}. {_AGAINST_EVICTION}. Or use a Redis that "
                "no other program uses. --allow-eviction (allow_eviction=True) initialises it as it is"
            )
        logger.warning(
            "%s: its INFO does not tell whether it evicts keys: its maxmemory-policy must be noeviction", name
        )


def _what_eviction_does(policy: str) -> str:
    gone = "held locks" if policy.startswith("volatile") else "held locks and the record of its tokens"
    return f"drops keys when its memory is full (maxmemory-policy {policy}): {gone} may be gone at any moment"


def warn_of_eviction(name: str, policy: str) -> None:
    if name not in _warned_of_eviction:
        _warned_of_eviction.add(name)
        logger.warning("%s %s. %s", name, _what_eviction_does(policy), _AGAINST_EVICTION)


def status(group: NodeGroup, view: MembershipView) -> Steps[tuple[NodeStatus, ...]]:
    """Return the status of every node, in order; its detail names the eviction policy, if there is one."""
    found = list(statuses(group.names, *(yield from group.read())))
    for node, identity in view.identities.items():
        if identity.eviction:
            details = filter(None, (found[node].detail, f"evicts keys ({identity.eviction})"))
            found[node] = replace(found[node], detail="; ".join(details))
    return tuple(found)


def compare_lists(group: NodeGroup) -> Steps[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the addresses of members that are not among these nodes, and of nodes that are not members."""
    reports, _ = yield from group.read()
    if (census := Census.of(group.names, reports)) is None:
        return (), ()
    met = {report.node_id for report in reports.values()}
    listed = census.membership
    missing = [name for node_id, name in listed.seats if node_id not in met and name not in group.names]
    if len(missing) <= len(group.names) - len(reports):  # silent nodes may be these, at other addresses
        missing = []
    strangers = [
        group.names[node]
        for node, report in reports.items()
        if report.node_id not in listed.ids and group.names[node] not in listed.addresses
    ]
    return tuple(missing), tuple(strangers)


def statuses(names: tuple[str, ...], reports: Reports, answers: NodeReplies) -> tuple[NodeStatus, ...]:
    try:
        census = Census.of(names, reports)
    except MembershipError:
        census = None
    found = []
    for node, name in enumerate(names):
        if node in reports:
            state, detail = _state(node, name, reports[node], census)
            left = reports[node].ticket_left if state is NodeState.RECOVERING else None
            longest = _max_ttl(reports[node])
            found.append(NodeStatus(name, state, reports[node].epoch, longest, left, "" if left else detail))
        else:
            detail = answers[node].detail or answers[node].kind.value
            found.append(NodeStatus(name, NodeState.UNREACHABLE, detail=detail))
    return tuple(found)


def _max_ttl(report: NodeReport) -> float | None:
    with suppress(MembershipError):  # its list cannot be read by this version
        return Membership.from_json(report.members).max_ttl if report.members else None
    return None


def _state(node: int, name: str, report: NodeReport, census: Census | None) -> tuple[NodeState, str]:
    if report.closed:
        return NodeState.CLOSED, f"its list gives way to {addresses_of(report.next_members)}"
    state = NodeState.BLANK if report.blank else NodeState.RESTARTED
    if census is None:
        if report.blank:
            return state, "new, or without its data"
        return NodeState.OTHER_MEMBERSHIP, "its list cannot be read by this version"
    if node in census.voters:
        return NodeState.ADMITTED, ""
    listed, seat = census.membership, census.waiting.get(node)
    addresses = ", ".join(listed.addresses)
    if seat is not None and not census.has_quorum and not census.complete:
        away = len(census.reports) < len(listed.seats)
        first = "bring back the nodes that are away; if they are lost, too: " if away else ""
        why = f"too few nodes remember the granted tokens: {first}fencelock init --after-loss"
    elif seat is not None:
        state = NodeState.RECOVERING if report.ticket else state
        why = "waits for a client that uses it"
    elif not report.blank and report.fingerprint != listed.fingerprint:
        why = f"belongs to {addresses_of(report.members)}, not to {addresses}"
        return NodeState.OTHER_MEMBERSHIP, why
    elif name in listed.addresses:
        why = "another node has its seat"
    else:
        why = f"its address is none of the list's: {addresses}"
    if not report.blank and report.node_id != seat:
        why = f"has the data of {dict(listed.seats).get(report.node_id, 'another node')}; {why}"
    return state, why


def change_nodes(
    present: Sequence[str],
    wanted: Sequence[str],
    *,
    namespace: str = "fencelock",
    max_ttl: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    patience: float = _CONNECT_TIMEOUT,
) -> Change:
    """Let the wanted nodes vote instead of the present ones; a node may be in both lists.

    Lost nodes may be left out of both lists. No lock is granted during the change, which waits until held
    leases have ended. After an interruption, call it again.

    Args:
        present: URLs of the nodes in use.
        wanted: URLs of the nodes to use after the change.
        namespace: the namespace on the nodes.
        max_ttl: the longest lease in seconds that the wanted nodes grant; as the present ones by default.
        tell: called with a sentence for each step.
        patience: seconds to wait for each node.

    Raises:
        QuorumError: too few nodes vote or could be changed, or a wanted node does not answer.
        MembershipError: no present node has a list, a wanted node cannot join, or another change goes on.
        ValueError: for a URL or `max_ttl` that cannot be used, or a wanted node that is named twice.
    """
    if max_ttl is not None:
        check_ttl(max_ttl)
    given = [Node(url, patience, verify_votes=False) for url in (*present, *wanted)]
    nodes: dict[str, Node] = {}
    for node in given:
        nodes.setdefault(node.name, node)
    group = group_of(tuple(nodes), f"{{{namespace}}}", patience)
    wanted_names = [node.name for node in given[len(present) :]]
    for name in wanted_names:
        if wanted_names.count(name) > 1:
            raise ValueError(f"{name} is named {wanted_names.count(name)} times: each node has one vote")
    connections = SharedConnections(
        list(nodes.values()),
        group.node_key,
        on_identity=lambda _node, _identity: None,
        on_trouble=lambda: None,
        connect_timeout=patience,
        patience=patience,
    )
    try:
        chosen = [group.names.index(name) for name in wanted_names]
        return run(change(group, chosen, tell, max_ttl), connections.do)
    finally:
        connections.close()
