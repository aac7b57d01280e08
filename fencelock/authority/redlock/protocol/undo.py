"""Giving up a bid."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from fencelock.authority.redlock.protocol.bids import Bid, in_pairs
from fencelock.authority.redlock.protocol.messages import Broadcast, Command, Round
from fencelock.authority.redlock.protocol.nodeset import Fleet


def without_place(release: Command) -> Command:
    """Return a RELEASE that gives no place in line, and gives none up."""
    return release._replace(arguments=release.arguments[: 1 + 2 * len(release.keys)])


def abandon(
    fleet: Fleet, bid: Bid, nodes: Sequence[int] | None = None, *, stay: bool = False
) -> Generator[Broadcast, Round, None]:
    """Release a failed bid, also where the answer was lost; wait for no answer.

    Args:
        fleet: the nodes.
        bid: the bid.
        nodes: where; everywhere by default.
        stay: keep the place in line.
    """
    command = release_command(fleet, bid, 0, (0,) * len(bid.resources), stay=stay)
    yield Broadcast(command, fleet.everybody if nodes is None else nodes, lambda _: True, 0.0)


def release_command(
    fleet: Fleet, bid: Bid, epoch: int, counters: Sequence[int], *, stay: bool = False
) -> Command:
    """Return the RELEASE of a bid. With `stay` it keeps the place in line."""
    arguments = (fleet.fingerprint, bid.nonce, epoch, *in_pairs(bid.stripes, counters))
    if (turn := bid.turn) is not None and turn.place:
        waiting = (round(turn.waited * 1000), round(turn.since * 1000)) if stay else ()
        arguments = (*arguments, turn.place, *waiting)
    return Command("release", bid.nonce, bid.keys, arguments)
