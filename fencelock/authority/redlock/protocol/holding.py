"""Operations on a lock that is held: extend, keep and remint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from fencelock._checks import MIN_TTL
from fencelock.authority.base import Grant, Wish, named
from fencelock.authority.redlock.protocol.acquire import Acquisition, make_attempt, next_pause
from fencelock.authority.redlock.protocol.attempts import Attempt, NodeSet, Proof, abandon
from fencelock.authority.redlock.protocol.messages import (
    KEPT,
    RECREATED,
    RESTORED_VALUE,
    Broadcast,
    Broadcasts,
    Command,
    NodeReplies,
    Replies,
    Reply,
    ReplyKind,
    Sleep,
    Steps,
)
from fencelock.authority.redlock.protocol.refusals import by_name, raise_ttl_too_long, report_of
from fencelock.errors import AuthorityError, FencelockError, LockLostError, QuorumError
from fencelock.lease import validity

BATCH: Final = 500  # the most grants in one EXTEND, which occupies a node for about a millisecond


def extend_many(
    current: Callable[[], NodeSet], wishes: Sequence[Wish]
) -> Broadcasts[list[Grant | FencelockError]]:
    """Extend grants, up to 500 in one command: see `Authority.extend_gen`."""
    outcomes: list[Grant | FencelockError] = []
    for start in range(0, len(wishes), BATCH):
        batch = wishes[start : start + BATCH]
        try:
            while True:
                node_set = current()
                if (longest := max(ttl for _, ttl in batch)) > node_set.max_ttl:
                    raise_ttl_too_long(longest, node_set)
                extended = yield from extend(node_set, batch)
                if current() == node_set:  # otherwise nodes answered for the first time, or have another list
                    break
        except AuthorityError as error:
            outcomes += [error] * len(batch)
        else:
            outcomes += extended
    return outcomes


def extend(node_set: NodeSet, wishes: Sequence[Wish]) -> Broadcasts[list[Grant | FencelockError]]:
    """Extend grants, each to its seconds from now; the tokens do not change.

    Returns an outcome for each: the grant, which ends no earlier than before; a LockLostError if a majority
    can no longer hold it for us; a QuorumError if too few nodes answered in time.

    A node that has made the lock again does not count in this round. Its vote may be needed, if it was
    admitted a moment ago and another node is blank now. Then there is a second round.
    """
    attempts = [replace(grant.proof.attempt, ttl=ttl) for grant, ttl in wishes]
    command = _extend_command(node_set, attempts, [grant.proof.epoch for grant, _ in wishes])
    patience = min(node_set.patience, *(attempt.ttl for attempt in attempts))
    request = Broadcast(command, node_set.all_nodes, _are_clear(node_set, len(attempts)), patience)
    done = yield request
    again: Replies | None = None
    outcomes: list[Grant | FencelockError] = []
    for index, wish in enumerate(wishes):
        outcome = _extended(node_set, wish, done, index)
        is_open = isinstance(outcome, QuorumError) and done.ended < wish[0].expires_at
        if is_open and _is_made_again(done, index):
            again = again or (yield request)
            outcome = _extended(node_set, wish, again, index)
        outcomes.append(outcome)
    return outcomes


def remint(
    current: Callable[[], NodeSet], acquisition: Acquisition, old: Grant, *, jitter: Callable[[], float]
) -> Steps[Grant]:
    """Exchange a grant for one with larger tokens; no other holder gets a grant in between.

    Each node does RELEASE and ACQUIRE in one step, under a new nonce, and forgets the old one. The attempt is
    decided and confirmed as any other. Some nodes may have forgotten the old nonce, so
    attempts are repeated until the old grant ends, or other clients have too many nodes.
    """
    try:
        while True:
            node_set = current()
            attempt = acquisition.next_attempt(node_set)
            outcome = yield from make_attempt(node_set, attempt)
            if isinstance(outcome, Grant):
                # On nodes where the new nonce has not arrived, the old lock would live on.
                yield from abandon(node_set, old.proof.attempt)
                return acquisition.in_order(outcome)
            yield from abandon(node_set, attempt)
            pause = next_pause(outcome, 0, jitter())
            others = sum(answer.kind is ReplyKind.HELD for answer in outcome.answers.values())
            if len(node_set.names) - others < node_set.quorum or outcome.ended + pause >= old.expires_at:
                yield from abandon(node_set, old.proof.attempt)
                break
            yield Sleep(pause)
    except (FencelockError, GeneratorExit):
        raise
    except BaseException:  # a signal handler's error, or a cancellation: only this releases the attempt
        yield from acquisition.abandon_latest()
        raise
    raise LockLostError(
        f"{attempt.name} got no new token: the lease has ended; acquire the lock again "
        f"({report_of(node_set, outcome.answers)})"
    )


def _extended(node_set: NodeSet, wish: Wish, done: Replies, index: int) -> Grant | FencelockError:
    grant, ttl = wish
    name = named(grant.resources)
    ours = _still_extended(node_set, done.answers, index)
    if ours is False:
        return LockLostError(
            f"{name} was not extended: the lease has ended; acquire the lock again "
            f"({report_of(node_set, _of_one(done.answers, index))})"
        )
    expires_at = validity(done.began, ttl)
    if ours is None or expires_at <= done.ended:
        answers = _of_one(done.answers, index)
        report = report_of(node_set, answers)
        return QuorumError(
            f"{name} was not extended: too few nodes answered in time: {report}",
            nodes=by_name(node_set.names, answers),
        )
    return replace(grant, expires_at=max(expires_at, grant.expires_at))


def keep(node_set: NodeSet, proof: Proof, seconds: float) -> Broadcasts[bool | None]:
    """Move the end of a grant to `seconds` from now, earlier or later; the tokens do not change.

    Returns True if a majority has the new end, False if no majority can any more, None if too few answered.
    """
    attempt = replace(proof.attempt, ttl=-max(seconds, MIN_TTL))
    command = _extend_command(node_set, [attempt], [proof.epoch])
    request = Broadcast(command, node_set.all_nodes, _are_clear(node_set, 1), node_set.patience)
    try:
        done = yield request
    except (FencelockError, GeneratorExit):
        raise
    except BaseException:  # a signal handler's error, or a cancellation: send it once more
        yield request._replace(enough=lambda _: True, patience=0.0)
        raise
    return _still_extended(node_set, done.answers, 0)


def _of_one(answers: NodeReplies, index: int) -> NodeReplies:
    said = {KEPT: ReplyKind.EXTENDED, RECREATED: ReplyKind.RESTORED}
    return {
        node: Reply(said.get(answer.counters[index], ReplyKind.LOST))
        if answer.kind is ReplyKind.EXTENDED
        else answer
        for node, answer in answers.items()
    }


def _still_extended(node_set: NodeSet, answers: NodeReplies, index: int) -> bool | None:
    """Return whether a majority has had a grant's lock all the time; None if a later round may confirm it.

    A lock that was made again counts from the next round on; on a blank node, after its admission.
    """
    extended = missed = 0
    for answer in answers.values():
        if answer.kind is ReplyKind.EXTENDED:
            extended += answer.counters[index] == KEPT
            missed += answer.counters[index] != KEPT
    if extended >= node_set.quorum:
        return True
    # A node may lose its memory as soon as another was admitted, so that for a short time no majority counts.
    # But if so many voters have missed the lock that no majority can have it, another holder is possible.
    return None if len(node_set.names) - missed >= node_set.quorum else False


def _is_made_again(done: Replies, index: int) -> bool:
    return any(
        answer.kind is ReplyKind.EXTENDED and answer.counters[index] == RECREATED
        for answer in done.answers.values()
    )


def _are_clear(node_set: NodeSet, count: int) -> Callable[[NodeReplies], bool]:
    """Return a function that tells whether the outcome of every grant is clear without more answers."""

    def enough(answers: NodeReplies) -> bool:
        if len(answers) < node_set.quorum:
            return False
        all_well = sum(
            answer.kind is ReplyKind.EXTENDED and min(answer.counters) == KEPT for answer in answers.values()
        )
        return all_well >= node_set.quorum or all(
            _still_extended(node_set, answers, index) is not None for index in range(count)
        )

    return enough


def _extend_command(node_set: NodeSet, attempts: Sequence[Attempt], epochs: Sequence[int]) -> Command:
    keys = (node_set.node_key, *(key for attempt in attempts for key in attempt.keys[1:]))
    parts: list[str | int] = []
    for attempt, epoch in zip(attempts, epochs, strict=True):
        restored = f"{attempt.nonce}|{epoch}|{RESTORED_VALUE}"
        parts += (attempt.nonce, round(attempt.ttl * 1000), len(attempt.resources), restored)
    return Command("extend", "", keys, (node_set.fingerprint, "", *parts))
