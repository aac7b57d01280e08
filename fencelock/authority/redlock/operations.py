"""One acquisition: its attempts, and its rest. No sockets, no clock.

Threads, event loops and the simulator run the same of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Final

from fencelock.authority.base import Grant, Wish
from fencelock.authority.redlock.protocol import acquire, holding
from fencelock.authority.redlock.protocol.attempts import Attempt, Granted, NodeSet, abandon
from fencelock.authority.redlock.protocol.messages import Request
from fencelock.authority.redlock.protocol.queue import Waiter
from fencelock.errors import AuthorityError, FencelockError
from fencelock.tokens import compose

#: Grants that are extended in one round trip. A node does nothing else meanwhile: about a millisecond.
BATCH: Final = 500


class Acquisition:
    """One attempt after the other, each with a nonce of its own.

    Args:
        resources: their names, in the order of the caller.
        ttl: seconds.
        new_nonce: makes a nonce. It is drawn when it is needed: two processes that were restored from one
            snapshot would have had the same in advance, and a node would take the attempt of one for that of
            the other, resent.
        waiter: knows its place in line; None where there is no waiting.
        instead_of: what the attempts take over.
    """

    def __init__(
        self,
        resources: tuple[str, ...],
        ttl: float,
        new_nonce: Callable[[], str],
        waiter: Waiter | None = None,
        instead_of: Granted | None = None,
    ) -> None:
        self._resources = resources
        self._canonical = resources if len(resources) == 1 else tuple(sorted(resources))
        self._ttl = ttl
        self._new_nonce = new_nonce
        self._waiter = waiter
        #: What makes an attempt more than an ordinary one.
        self._special: dict[str, Any] = {}
        if instead_of is not None:
            hints = tuple(counter + 1 for counter in instead_of.counters)
            self._special = {
                "hint_epoch": instead_of.epoch,
                "hints": hints,
                "instead_of": instead_of.attempt.nonce,
            }
        self._latest: tuple[NodeSet, Attempt] | None = None

    def next_attempt(self, node_set: NodeSet) -> Attempt:
        """Return a new attempt, with a nonce of its own.

        Raises:
            ValueError: the ttl is longer than these nodes allow.
        """
        check_max_ttl(self._ttl, node_set)
        nonce = self._new_nonce()
        position = self._waiter.position() if self._waiter is not None else None
        attempt = Attempt.of(node_set, self._canonical, nonce, self._ttl, position)
        if self._special:
            attempt = replace(attempt, **self._special)
        self._latest = node_set, attempt
        return attempt

    def acquire(
        self,
        see: Callable[[], NodeSet],
        *,
        began: float,
        timeout: float | None,
        grace: float,
        outage: float,
        jitter: Callable[[], float],
        go_on: Callable[[], None] = lambda: None,
    ) -> Generator[Request, Any, Grant]:
        attempts = acquire.acquire(
            see,
            self.next_attempt,
            began=began,
            timeout=timeout,
            grace=grace,
            outage=outage,
            jitter=jitter,
            go_on=go_on,
        )
        return self._ending(attempts)

    def remint(
        self, see: Callable[[], NodeSet], granted: Granted, *, jitter: Callable[[], float]
    ) -> Generator[Request, Any, Grant]:
        return self._ending(holding.remint(see, self.next_attempt, granted, jitter=jitter))

    def _ending(self, attempts: Generator[Request, Any, Granted]) -> Generator[Request, Any, Grant]:
        """Return the grant that the attempts come to; leave nothing behind where they come to none."""
        try:
            granted = yield from attempts
            self._leave_queue()
            return self._won(granted)
        except (FencelockError, GeneratorExit):  # the last attempt was abandoned before that
            self._leave_queue()
            raise
        except BaseException:  # of a signal handler, or a cancellation: nothing else would release it
            if self._latest is not None:
                yield from abandon(*self._latest)
            self._leave_queue()
            raise

    def _leave_queue(self) -> None:
        if self._waiter is not None:
            self._waiter.leave()

    def _won(self, granted: Granted) -> Grant:
        """Return the grant that an attempt has come to."""
        counters = dict(zip(self._canonical, granted.counters, strict=True))
        tokens = tuple(compose(granted.epoch, counters[resource]) for resource in self._resources)
        return Grant(self._resources, tokens, granted.expires_at, granted)


def extend(
    see: Callable[[], NodeSet], wishes: Sequence[Wish]
) -> Generator[Request, Any, list[Grant | FencelockError]]:
    """Let grants live on, so many in one round trip: see `Authority.extend_many`."""
    outcomes: list[Grant | FencelockError] = []
    for start in range(0, len(wishes), BATCH):
        batch = wishes[start : start + BATCH]
        try:
            while True:
                node_set = see()
                for _, ttl in batch:
                    check_max_ttl(ttl, node_set)
                ends = yield from holding.extend(node_set, [(grant.proof, ttl) for grant, ttl in batch])
                if see() == node_set:  # else nodes were heard for the first time, or have got another list
                    break
        except AuthorityError as error:
            outcomes += [error] * len(batch)
        else:
            outcomes += [_extended(grant, end) for (grant, _), end in zip(batch, ends, strict=True)]
    return outcomes


def _extended(grant: Grant, end: float | FencelockError) -> Grant | FencelockError:
    """Return a grant with the end that the protocol has found, or why there is none."""
    if isinstance(end, FencelockError):
        return end
    return replace(grant, expires_at=end, proof=replace(grant.proof, expires_at=end))


def release(see: Callable[[], NodeSet], granted: Granted) -> Generator[Request, Any, bool | None]:
    """Give a lock back: see `holding.release`. Where that is interrupted, it is sent once more."""
    try:
        return (yield from holding.release(see(), granted))
    except (FencelockError, GeneratorExit):
        raise
    except BaseException:
        yield from abandon(see(), granted.attempt)
        raise


def check_max_ttl(ttl: float, node_set: NodeSet) -> None:
    """Refuse what the nodes would not keep out for.

    Raises:
        ValueError: the ttl is longer than they allow.
    """
    if ttl > node_set.max_ttl:
        raise ValueError(
            f"a ttl of {ttl:g} s is longer than the {node_set.max_ttl:g} s that these nodes allow: one that "
            "lost its memory stays out for no longer. Use a shorter one, which is renewed, or type: "
            + node_set.init_command.replace("init", f"nodes set --max-ttl {math.ceil(ttl)}", 1)
        )
