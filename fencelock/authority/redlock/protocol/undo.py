"""Giving up: which RELEASEs undo what a command may have locked."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from fencelock.authority.redlock.protocol.bids import Bid, in_pairs
from fencelock.authority.redlock.protocol.messages import Broadcast, Command, Round
from fencelock.authority.redlock.protocol.nodeset import Fleet


def undoing(command: Command) -> list[Command]:
    """Return the RELEASEs of what a command may have locked whose answer never comes.

    They give no place in line, as a RELEASE may: by now no bidder may wait there any more.
    """
    script, nonce, keys, arguments = command
    if script == "release":
        return [command._replace(arguments=arguments[: 1 + 2 * len(keys)])]
    if script == "acquire":
        return [_undo(nonce, keys)]
    found, key = [], 1
    for at in range(2, len(arguments) if script == "extend" else 0, 4):
        its_nonce, _, locks, _ = arguments[at : at + 4]
        found.append(_undo(str(its_nonce), (keys[0], *keys[key : key + int(locks)])))
        key += int(locks)
    return found


def _undo(nonce: str, keys: tuple[str, ...]) -> Command:
    """Return a RELEASE that decides nothing, of a client whose list of nodes may be another by now."""
    return Command("release", nonce, keys, ("", nonce, 0, *(0, 0) * (len(keys) - 1)))


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
