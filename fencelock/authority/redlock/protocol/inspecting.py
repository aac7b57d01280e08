"""Shows the holders of locks, and releases a lock of any holder.

A nonce begins with the id of its client and the time of its attempt. Each client keeps its host, process id
and program under its id on the nodes, so that no vote carries them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from fencelock.authority.redlock.protocol.attempts import (
    CLIENT_DIGITS,
    TIME_DIGITS,
    Attempt,
    NodeSet,
    names_of,
    release_command,
)
from fencelock.authority.redlock.protocol.messages import (
    Broadcast,
    Broadcasts,
    Command,
    NodeReplies,
    Reply,
    ReplyKind,
)
from fencelock.authority.redlock.protocol.refusals import raise_no_quorum
from fencelock.holder import Holder, LockInfo
from fencelock.tokens import compose, split

PAGE: Final = 200  # keys that a node reads in one script; it does nothing else meanwhile
_FACTS: Final = 5
_GONE: Final = frozenset({ReplyKind.RELEASED, ReplyKind.LOST, ReplyKind.AMNESIA})


class _Seen(NamedTuple):
    """A lock as one node has it."""

    value: str
    left: float
    waiters: int
    who: str

    @property
    def nonce(self) -> str:
        """The nonce of its grant; all of the value, if another program has written it."""
        return self.value.partition("|")[0]


_Sightings = dict[int, _Seen]  # the lock of one resource, as each node has it, by node


def look(current: Callable[[], NodeSet], resources: tuple[str, ...]) -> Broadcasts[list[LockInfo]]:
    """Return the locks of these resources that are held; of all resources, if none is named.

    A lock that only a minority of the nodes still has is shown, too, unless a majority says that it is free.
    """
    node_set, seen, voters = yield from _seen_by_nodes(current, resources)
    order = {resource: index for index, resource in enumerate(resources)}
    return [
        _info(name, list(seen[name].values()))
        for name in sorted(seen, key=lambda name: (order.get(name, 0), name))
        if voters - len(seen[name]) < node_set.quorum
    ]


def is_held(current: Callable[[], NodeSet], resources: tuple[str, ...]) -> Broadcasts[bool]:
    """Return whether one holder has one of these resources on a majority of the nodes."""
    node_set, seen, _ = yield from _seen_by_nodes(current, resources)
    votes = (Counter(each.nonce for each in its.values()) for its in seen.values())
    return any(max(each.values()) >= node_set.quorum for each in votes)


def force(current: Callable[[], NodeSet], resource: str, token: int | None) -> Broadcasts[LockInfo | None]:
    """Release a lock of any holder, or only of the holder of `token`; return its `LockInfo`, or None.

    The holder learns of this when it extends the lease.
    """
    node_set, seen, _ = yield from _seen_by_nodes(current, (resource,))
    its = list(seen.get(resource, {}).values())
    if token is not None and its and _info(resource, its).token != token:
        return None
    for nonce in {each.nonce for each in its}:
        attempt = Attempt.of(node_set, (resource,), nonce, 0.0)
        command = release_command(node_set, attempt, 0, (0,))
        done = yield Broadcast(command, node_set.all_nodes, lambda _: False, node_set.patience)
        if sum(answer.kind in _GONE for answer in done.answers.values()) < node_set.quorum:
            raise_no_quorum(node_set, done.answers)
    return _info(resource, its) if its else None


def vouch(current: Callable[[], NodeSet], nonce: str, tokens: Mapping[str, int]) -> Broadcasts[bool]:
    """Return whether each resource is locked by this nonce, and a node has granted it this token."""
    # A node may have granted another token than was decided. A text of `hand_over` that has it harms
    # only this lock.
    _, seen, _ = yield from _seen_by_nodes(current, tuple(tokens))
    return all(
        any(each.value == "|".join((nonce, *map(str, split(token)))) for each in seen.get(name, {}).values())
        for name, token in tokens.items()
    )


def _seen_by_nodes(
    current: Callable[[], NodeSet], resources: tuple[str, ...]
) -> Broadcasts[tuple[NodeSet, dict[str, _Sightings], int]]:
    """Return the nodes, the locks of each resource by node, and how many of the nodes vote."""
    while True:
        node_set = current()
        pages: dict[int, list[Reply]] = {node: [] for node in node_set.all_nodes}
        if resources:
            keys, _ = names_of(node_set.node_key, resources)
            done = yield _ask(node_set, list(pages), keys)._replace(enough=_are_clear(node_set, resources))
            pages = {node: [answer] for node, answer in done.answers.items()}
        else:
            for node in pages:
                pages[node] = yield from _pages_of(node_set, node, "")
        if current() == node_set:  # otherwise nodes answered for the first time, or have another list
            break
    last = {node: its[-1] for node, its in pages.items()}
    voters = [node for node, answer in last.items() if answer.kind is ReplyKind.SHOWN]
    if len(voters) < node_set.quorum:
        raise_no_quorum(node_set, last)
    seen: dict[str, _Sightings] = {}
    for node in voters:
        for resource, its in _locks_of(pages[node]):
            seen.setdefault(resource, {})[node] = its
    return node_set, seen, len(voters)


def look_for_endless(current: Callable[[], NodeSet], pattern: str) -> Broadcasts[dict[int, list[str]]]:
    """Return the keys without an expiry that match a pattern of Redis, by each node that votes."""
    yield from _seen_by_nodes(current, ("fencelock",))  # so that the nodes are known
    node_set = current()
    found: dict[int, list[str]] = {}
    last: dict[int, Reply] = {}
    for node in node_set.all_nodes:
        pages = yield from _pages_of(node_set, node, pattern)
        last[node] = pages[-1]
        if last[node].kind is ReplyKind.SHOWN:
            found[node] = sorted({key for page in pages for key in page.facts[1:]})
    if len(found) < node_set.quorum:
        raise_no_quorum(node_set, last)
    return found


def _pages_of(node_set: NodeSet, node: int, pattern: str) -> Broadcasts[list[Reply]]:
    """Return the answers of a node to INSPECT, page by page; the last may be a refusal."""
    pages: list[Reply] = []
    following = "0"
    while True:
        done = yield _ask(node_set, [node], (node_set.node_key,), following, PAGE, pattern)
        pages.append(done.answers[node])
        following = pages[-1].facts[0] if pages[-1].kind is ReplyKind.SHOWN else "0"
        if following == "0":
            return pages


def _ask(node_set: NodeSet, nodes: list[int], keys: tuple[str, ...], *page: str | int) -> Broadcast:
    command = Command("inspect", "", keys, (node_set.fingerprint, "", *page))
    return Broadcast(command, nodes, lambda answers: len(answers) == len(nodes), node_set.patience)


def _are_clear(node_set: NodeSet, resources: tuple[str, ...]) -> Callable[[NodeReplies], bool]:
    """Return a function that tells whether, for each resource, a majority has the lock, or has not."""

    def enough(answers: NodeReplies) -> bool:
        voters = [answer for answer in answers.values() if answer.kind is ReplyKind.SHOWN]
        held = Counter(answer.facts[at] for answer in voters for at in range(1, len(answer.facts), _FACTS))
        return all(
            max(held[resource], len(voters) - held[resource]) >= node_set.quorum for resource in resources
        )

    return enough


def _locks_of(pages: list[Reply]) -> Generator[tuple[str, _Seen], None, None]:
    for page in pages:
        facts = page.facts[1:]
        for at in range(0, len(facts), _FACTS):
            resource, value, left, waiters, who = facts[at : at + _FACTS]
            yield resource, _Seen(value, int(left) / 1000 if int(left) >= 0 else math.inf, int(waiters), who)


def _info(resource: str, seen: list[_Seen]) -> LockInfo:
    nonce, _ = Counter(each.nonce for each in seen).most_common(1)[0]
    its = [each for each in seen if each.nonce == nonce]
    since = _since(nonce)
    return LockInfo(
        resource=resource,
        token=_token_of(its),
        holder=None if since is None else Holder.of(max(each.who for each in its), since),
        remaining=max(each.left for each in its),
        waiters=max(each.waiters for each in seen),
    )


def _since(nonce: str) -> float | None:
    """Return when a nonce was made, in Unix time; None if another program has written it."""
    made = re.match(f"[0-9a-f]{{{CLIENT_DIGITS}}}([0-9a-f]{{{TIME_DIGITS}}})", nonce)
    return int(made[1], 16) / 1000 if made else None


def _token_of(seen: list[_Seen]) -> int | None:
    """Return the token of a lock; None if these nodes lack it, as after EXTEND has made the lock again."""
    tokens = []
    for each in seen:
        if numbers := re.fullmatch(r"[^|]*\|([0-9]{1,6})\|([0-9]{1,14})", each.value):
            with suppress(OverflowError):  # another program has written it
                tokens.append(compose(*map(int, numbers.groups())))
    # The nodes of a majority have the decided token; other nodes may have granted less, or more.
    return max(tokens, key=lambda each: (tokens.count(each), each), default=None)
