"""Who holds which locks. It asks the nodes and changes nothing.

A nonce begins with the id of its client and the time of its attempt. Each client keeps what it is (host,
process id, program) under its id on the nodes, so that no vote carries it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

from fencelock import token
from fencelock.authority.base import Holder, LockInfo
from fencelock.authority.redlock.protocol.messages import Answer, Broadcast, Command, Round, Said
from fencelock.authority.redlock.protocol.nodeset import NodeSet, names_of
from fencelock.authority.redlock.protocol.refusals import raise_no_quorum

#: Keys that a node looks at in one script: about a millisecond.
PAGE: Final = 200
CLIENT_DIGITS: Final = 16
_TIME_DIGITS: Final = 11
_FACTS: Final = 5
_MOST_OF_A_TOKEN: Final = 2


def new_nonce(client: str, wall: float, random: str) -> str:
    """Return a nonce that tells whose it is, and since when.

    Args:
        client: the id of the client: 16 hexadecimal digits.
        wall: Unix time in seconds.
        random: drawn anew for each nonce, because the state of a process may be copied.
    """
    return f"{client}{int(wall * 1000):0{_TIME_DIGITS}x}{random}"


class _Seen(NamedTuple):
    """A lock as one node has it."""

    value: str
    left: float
    waiters: int
    who: str


def look(see: Callable[[], NodeSet], resources: tuple[str, ...]) -> Generator[Broadcast, Any, list[LockInfo]]:
    """Return those of the resources that are held; of all, where none is named.

    A lock that a minority of the nodes has left is shown as well, if a majority does not say that it is free.

    Raises:
        QuorumError: too few nodes vote.
    """
    while True:
        node_set = see()
        pages: dict[int, list[Answer]] = {node: [] for node in node_set.everybody}
        if resources:
            keys, _ = names_of(node_set.node_key, resources)
            done = yield _ask(node_set, list(pages), keys)
            for node, answer in done.answers.items():
                pages[node].append(answer)
        else:
            for node in pages:
                pages[node] = yield from _pages_of(node_set, node, "")
        if see() == node_set:  # else nodes were heard for the first time, or have got another list
            break
    last = {node: its[-1] for node, its in pages.items()}
    voters = [node for node, answer in last.items() if answer.said is Said.SHOWN]
    if len(voters) < node_set.quorum:
        raise_no_quorum(node_set, last)
    seen: dict[str, dict[int, _Seen]] = {}
    for node in voters:
        for resource, its in _locks_of(pages[node]):
            seen.setdefault(resource, {})[node] = its
    order = {resource: index for index, resource in enumerate(resources)}
    names = sorted(seen, key=lambda name: (order.get(name, 0), name))
    return [
        _info(name, list(seen[name].values()))
        for name in names
        if len(voters) - len(seen[name]) < node_set.quorum
    ]


def look_for_endless(node_set: NodeSet, pattern: str) -> Generator[Broadcast, Any, dict[int, list[str]]]:
    """Return the keys without an end that match a pattern of Redis, by node."""
    found: dict[int, list[str]] = {}
    for node in node_set.everybody:
        pages = yield from _pages_of(node_set, node, pattern)
        if pages[-1].said is not Said.SHOWN:
            raise_no_quorum(node_set, {node: pages[-1]})
        found[node] = sorted({key for page in pages for key in page.facts[1:]})
    return found


def _pages_of(node_set: NodeSet, node: int, pattern: str) -> Generator[Broadcast, Round, list[Answer]]:
    """Return the answers of a node to INSPECT, page by page; the last may be a refusal."""
    pages: list[Answer] = []
    following = "0"
    while True:
        done = yield _ask(node_set, [node], (node_set.node_key,), following, PAGE, pattern)
        pages.append(done.answers[node])
        following = pages[-1].facts[0] if pages[-1].said is Said.SHOWN else "0"
        if following == "0":
            return pages


def _ask(node_set: NodeSet, nodes: list[int], keys: tuple[str, ...], *page: str | int) -> Broadcast:
    command = Command("inspect", "", keys, (node_set.fingerprint, "", *page))
    return Broadcast(command, nodes, lambda answers: len(answers) == len(nodes), node_set.patience)


def _locks_of(pages: list[Answer]) -> Generator[tuple[str, _Seen], None, None]:
    for page in pages:
        facts = page.facts[1:]
        for at in range(0, len(facts), _FACTS):
            resource, value, left, waiters, who = facts[at : at + _FACTS]
            yield resource, _Seen(value, int(left) / 1000 if int(left) >= 0 else math.inf, int(waiters), who)


def _info(resource: str, seen: list[_Seen]) -> LockInfo:
    """Return what most nodes say of a lock."""
    nonce, _ = Counter(its.value.partition("|")[0] for its in seen).most_common(1)[0]
    its = [each for each in seen if each.value.partition("|")[0] == nonce]
    since = _since(nonce)
    return LockInfo(
        resource=resource,
        token=_token_of(its),
        holder=None if since is None else Holder.of(max(each.who for each in its), since),
        remaining=max(each.left for each in its),
        waiters=max(each.waiters for each in seen),
    )


def _since(nonce: str) -> float | None:
    """Return when a nonce was made, in Unix time; None for what something else has written."""
    digits = nonce[CLIENT_DIGITS : CLIENT_DIGITS + _TIME_DIGITS]
    return int(digits, 16) / 1000 if re.fullmatch(f"[0-9a-f]{{{_TIME_DIGITS}}}", digits) else None


def _token_of(seen: list[_Seen]) -> int | None:
    """Return the token of a lock; None where EXTEND has made it again on all of these nodes."""
    tokens = []
    for each in seen:
        numbers = each.value.split("|")[1:]
        if len(numbers) == _MOST_OF_A_TOKEN and all(map(str.isdecimal, numbers)):
            tokens.append(token.compose(int(numbers[0]), int(numbers[1])))
    # A majority stands at the token; other nodes may have granted less, or more.
    return max(tokens, key=lambda each: (tokens.count(each), each), default=None)
