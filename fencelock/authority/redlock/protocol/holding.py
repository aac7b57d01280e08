"""What is done with a lock that is held: give it back, let it live on, mint anew; and whether it is held."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from fencelock.authority.base import validity
from fencelock.authority.redlock.protocol.acquire import attempt, next_pause
from fencelock.authority.redlock.protocol.bids import Bid, Granted
from fencelock.authority.redlock.protocol.messages import (
    EXTENDED,
    MADE_AGAIN,
    RESTORED,
    Answer,
    Answers,
    Broadcast,
    Command,
    Request,
    Round,
    Said,
    Sleep,
)
from fencelock.authority.redlock.protocol.nodeset import Fleet, can_vote, count_of, enough_released, names_of
from fencelock.authority.redlock.protocol.refusals import by_name, raise_no_quorum, report_of
from fencelock.authority.redlock.protocol.undo import abandon, release_command
from fencelock.errors import FencelockError, LockLostError, QuorumError


def release(fleet: Fleet, granted: Granted) -> Generator[Broadcast, Round, bool | None]:
    """Give the lock back, and let lagging nodes catch up with the token.

    Returns True if a majority still held it for us, False if that can no longer be, None if too few
    nodes answered to tell; in that case the lock ends by itself with its ttl.
    """
    command = release_command(fleet, granted.bid, granted.epoch, granted.counters)
    done = yield Broadcast(command, fleet.everybody, enough_released(fleet), fleet.patience)
    if count_of(Said.RELEASED, done.answers) >= fleet.quorum:
        return True
    # RELEASE is never refused. Voters that do not know the lock and blank nodes are not added up: see EXTEND.
    gone = max(count_of(Said.LOST, done.answers), count_of(Said.AMNESIA, done.answers))
    return None if len(fleet.names) - gone >= fleet.quorum else False


def extend(
    fleet: Fleet, wishes: Sequence[tuple[Granted, float]]
) -> Generator[Broadcast, Round, list[float | FencelockError]]:
    """Let grants live on, each for so many seconds from now; the tokens stay.

    Returns for each when it ends, on the driver's clock and never earlier than it would have without; a
    LockLostError if a majority can no longer hold it for us; a QuorumError if too few nodes answered to tell,
    and it still ends when it would have.

    A node that had no lock, and has made it again, counts for nothing in this round. Where it might be the
    last that is needed, for it was admitted a moment ago and the next is blank, there is a second round.
    """
    bids = [replace(granted.bid, ttl=ttl) for granted, ttl in wishes]
    command = _extend_command(fleet, bids, [granted.epoch for granted, _ in wishes])
    patience = min(fleet.patience, *(bid.ttl for bid in bids))
    request = Broadcast(command, fleet.everybody, _are_clear(fleet, len(bids)), patience)
    done = yield request
    again: Round | None = None
    ends: list[float | FencelockError] = []
    for index, ((granted, _), bid) in enumerate(zip(wishes, bids, strict=True)):
        end = _extended(fleet, bid, granted, done, index)
        if isinstance(end, QuorumError) and done.ended < granted.expires_at and _is_made_again(done, index):
            again = again or (yield request)
            end = _extended(fleet, bid, granted, again, index)
        ends.append(end)
    return ends


def remint(
    see: Callable[[], Fleet],
    new_bid: Callable[[Fleet], Bid],
    granted: Granted,
    *,
    jitter: Callable[[], float],
) -> Generator[Request, Round | float, Granted]:
    """Exchange a grant for one with larger tokens, without letting anybody in between: with bids made anew.

    On each node RELEASE and ACQUIRE in one step, under a new nonce: the old one is not heard of again. It is
    decided and confirmed as any acquisition; and tried again until the validity is over, for a part of the
    nodes has forgotten the old nonce already.

    Raises:
        LockLostError: it came to nothing, and neither is the old grant in force any more.
    """
    while True:
        fleet = see()
        bid = new_bid(fleet)
        outcome = yield from attempt(fleet, bid)
        if isinstance(outcome, Granted):
            # Where the new nonce has not arrived, the old lock would live on.
            yield from abandon(fleet, granted.bid)
            return outcome
        yield from abandon(fleet, bid)
        pause = next_pause(outcome, 0, jitter())
        others = sum(answer.said is Said.HELD for answer in outcome.answers.values())
        if len(fleet.names) - others < fleet.quorum or outcome.ended + pause >= granted.expires_at:
            yield from abandon(fleet, granted.bid)
            raise LockLostError(
                f"{bid.name} was not minted anew: the lease has ended; acquire the lock again "
                f"({report_of(fleet, outcome.answers)})"
            )
        yield Sleep(pause)


def holder_ttl(
    see: Callable[[], Fleet], resources: tuple[str, ...]
) -> Generator[Broadcast, Round, float | None]:
    """Return for how many seconds one of the resources is held; None where all are, on a majority, free."""

    def enough(answers: Answers) -> bool:
        held, spare = count_of(Said.HELD, answers), len(fleet.names) - fleet.quorum
        return can_vote(fleet, answers) and (held > spare or count_of(Said.LOST, answers) >= fleet.quorum)

    while True:
        fleet = see()
        keys, _ = names_of(fleet.node_key, resources)
        command = Command("holder", "", keys, (fleet.fingerprint, ""))
        done = yield Broadcast(command, fleet.everybody, enough, fleet.patience)
        if see() == fleet:  # else nodes were heard for the first time, or have got another list
            break
    if not can_vote(fleet, done.answers):
        raise_no_quorum(fleet, done.answers)
    if count_of(Said.LOST, done.answers) >= fleet.quorum:
        return None
    return max(answer.ttl for answer in done.answers.values() if answer.said is Said.HELD)


def _extended(fleet: Fleet, bid: Bid, granted: Granted, done: Round, index: int) -> float | FencelockError:
    """Return what became of one grant's extension."""
    ours = _still_extended(fleet, done.answers, index)
    if ours is False:
        return LockLostError(
            f"{bid.name} was not extended: the lease has ended; acquire the lock again "
            f"({report_of(fleet, _of_one(done.answers, index))})"
        )
    expires_at = validity(done.began, bid.ttl)
    if ours is None or expires_at <= done.ended:
        answers = _of_one(done.answers, index)
        return QuorumError(
            f"{bid.name} was not extended: too few nodes answered in time: {report_of(fleet, answers)}",
            nodes=by_name(fleet.names, answers),
        )
    return max(expires_at, granted.expires_at)


def _of_one(answers: Answers, index: int) -> Answers:
    """Return what the nodes said of one of the grants that were to be extended."""
    said = {EXTENDED: Said.EXTENDED, MADE_AGAIN: Said.RESTORED}
    return {
        node: Answer(said.get(answer.counters[index], Said.LOST)) if answer.said is Said.EXTENDED else answer
        for node, answer in answers.items()
    }


def _still_extended(fleet: Fleet, answers: Answers, index: int) -> bool | None:
    """Return whether a majority has had a grant's lock all the time; None where that can still be said later.

    What a node has made again counts from the next round on, and what a blank one has, when it is admitted: a
    node may forget as soon as another has been admitted, and soon after a majority has had the lock all the
    time. Only where a majority votes and has missed it, others may have had it.
    """
    extended = missed = 0
    for answer in answers.values():
        if answer.said is Said.EXTENDED:
            extended += answer.counters[index] == EXTENDED
            missed += answer.counters[index] != EXTENDED
    if extended >= fleet.quorum:
        return True
    return None if len(fleet.names) - missed >= fleet.quorum else False


def _is_made_again(done: Round, index: int) -> bool:
    """Whether a node has made a grant's lock again."""
    return any(
        answer.said is Said.EXTENDED and answer.counters[index] == MADE_AGAIN
        for answer in done.answers.values()
    )


def _are_clear(fleet: Fleet, count: int) -> Callable[[Answers], bool]:
    """Return whether more answers to EXTEND could not change what became of any of so many grants."""

    def enough(answers: Answers) -> bool:
        if len(answers) < fleet.quorum:
            return False
        all_well = sum(
            answer.said is Said.EXTENDED and min(answer.counters) == EXTENDED for answer in answers.values()
        )
        return all_well >= fleet.quorum or all(
            _still_extended(fleet, answers, index) is not None for index in range(count)
        )

    return enough


def _extend_command(fleet: Fleet, bids: Sequence[Bid], epochs: Sequence[int]) -> Command:
    keys = (fleet.node_key, *(key for bid in bids for key in bid.keys[1:]))
    parts: list[str | int] = []
    for bid, epoch in zip(bids, epochs, strict=True):
        parts += bid.nonce, bid.ttl_ms, len(bid.resources), f"{bid.nonce}|{epoch}|{RESTORED}"
    return Command("extend", "", keys, (fleet.fingerprint, "", *parts))
