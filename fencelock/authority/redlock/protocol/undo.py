"""Giving up: which RELEASEs undo what a command may have locked."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from fencelock.authority.redlock.protocol.bids import Bid, in_pairs
from fencelock.authority.redlock.protocol.messages import MADE_AGAIN, Answer, Broadcast, Command, Round, Said
from fencelock.authority.redlock.protocol.nodeset import Fleet, names_of, names_of_one

#: What a node says that may have made locks again.
MAKES_AGAIN = frozenset({Said.EXTENDED, Said.AMNESIA, Said.RESTARTED})


def undoing(command: Command, answer: Answer | None) -> list[Command]:
    """Return the RELEASEs of what a command may have locked while nothing waits for its answer.

    Whoever gets such an answer (None: it will never come) sends those that are of no grant in use. They give
    no place in line, as a RELEASE may: by now no bidder may wait there any more.
    """
    script, nonce, keys, arguments = command
    if script == "release":
        has_place = len(arguments) > 1 + 2 * len(keys)
        return [] if answer else [command._replace(arguments=(*arguments[:-1], "")) if has_place else command]
    if script == "acquire" and (answer is None or answer.said is Said.GRANTED):
        place, waited = (*arguments[2 + 2 * len(keys) :], "", 0)[:2]
        return [_undo(nonce, keys, (place, waited, "") if place else ())]
    if script != "extend" or (answer is not None and answer.said not in MAKES_AGAIN):
        return []
    if answer is not None and answer.said is not Said.EXTENDED:
        answer = None  # it says nothing about each
    found, key = [], 1
    for index in range(len(arguments[2:]) // 4):
        its_nonce, _, locks, _ = arguments[2 + 4 * index : 6 + 4 * index]
        if answer is None or answer.counters[index] == MADE_AGAIN:
            found.append(_undo(str(its_nonce), (keys[0], *keys[key : key + int(locks)])))
        key += int(locks)
    return found


def _undo(nonce: str, keys: tuple[str, ...], turn: tuple[str | int, ...] = ()) -> Command:
    """Return a RELEASE that decides nothing, of a client whose list of nodes may be another by now.

    It names the stripes all the same: a node that grants the lock to a bidder in line counts on from there.
    With a turn, that bid is not granted while it waits.
    """
    resources = tuple(key.removeprefix(f"{keys[0]}:l:") for key in keys[1:])
    _, stripes = (names_of_one if len(resources) == 1 else names_of)(keys[0], resources)
    return Command("release", nonce, keys, ("", nonce, 0, *in_pairs(stripes, (0,) * len(stripes)), *turn))


def abandon(fleet: Fleet, bid: Bid, links_until: float = math.inf) -> Generator[Broadcast, Round, None]:
    """Release a failed bid everywhere, also where the answer was lost; wait for no answer."""
    command = release_command(fleet, bid, 0, (0,) * len(bid.resources))
    yield Broadcast(command, fleet.everybody, lambda _: True, 0.0, links_until=links_until)


def release_command(
    fleet: Fleet, bid: Bid, epoch: int, counters: Sequence[int], *, stay: bool = False
) -> Command:
    """Return the RELEASE of a bid. With `stay` it keeps the place in line."""
    arguments = (fleet.fingerprint, bid.nonce, epoch, *in_pairs(bid.stripes, counters))
    turn = bid.turn
    if turn is not None and turn.place:
        waiting = (round(turn.waited * 1e6) if stay else "leave", round(turn.since * 1000))
        arguments = (*arguments, turn.place, *waiting)
    return Command("release", bid.nonce, bid.keys, arguments)
