"""Giving up an attempt."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from fencelock.authority.redlock.protocol.attempts import Attempt, in_pairs
from fencelock.authority.redlock.protocol.messages import Broadcast, Command, Round
from fencelock.authority.redlock.protocol.nodeset import NodeSet


def without_place(release: Command) -> Command:
    """Return a RELEASE that gives no place in line, and gives none up."""
    return release._replace(arguments=release.arguments[: 1 + 2 * len(release.keys)])


def abandon(
    node_set: NodeSet, attempt: Attempt, nodes: Sequence[int] | None = None, *, stay: bool = False
) -> Generator[Broadcast, Round, None]:
    """Release a failed attempt, also where the answer was lost; wait for no answer.

    Args:
        node_set: the nodes.
        attempt: the attempt.
        nodes: where; everywhere by default.
        stay: keep the place in line.
    """
    command = release_command(node_set, attempt, 0, (0,) * len(attempt.resources), stay=stay)
    yield Broadcast(command, node_set.everybody if nodes is None else nodes, lambda _: True, 0.0)


def release_command(
    node_set: NodeSet, attempt: Attempt, epoch: int, counters: Sequence[int], *, stay: bool = False
) -> Command:
    """Return the RELEASE of an attempt. With `stay` it keeps the place in line."""
    arguments = (node_set.fingerprint, attempt.nonce, epoch, *in_pairs(attempt.stripes, counters))
    if (position := attempt.position) is not None and position.place:
        waiting = (round(position.waited * 1000), round(position.since * 1000)) if stay else ()
        arguments = (*arguments, position.place, *waiting)
    return Command("release", attempt.nonce, attempt.keys, arguments)
