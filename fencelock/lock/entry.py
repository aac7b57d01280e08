"""One time that a lock was entered, and what it is inside."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from fencelock._holds import Hold, add
from fencelock._owners import current_owner
from fencelock.errors import LockLostError
from fencelock.lease import Lease
from fencelock.lock.releasing import Loss, release_each, release_hold, waits_for_transactions
from fencelock.lock.steps import Call, Steps
from fencelock.renewal.schedule import tell


class Entry:
    """One time that a lock was entered.

    Attributes:
        owner: the thread, task or greenlet that did.
        mark: stands for it in the holds' blocks, which must not refer to it: a cycle would keep a lock that
            was thrown away alive, and renewed, until the garbage collector comes along.
        asked: for what it did not hold before.
        holds: what it is inside.
        leases: what it yields, in the order of the lock's resources.
    """

    __slots__ = ("asked", "holds", "leases", "mark", "owner")

    def __init__(self) -> None:
        self.owner = current_owner()
        self.mark = object()
        self.asked: Call | None = None
        self.holds: tuple[Hold, ...] = ()
        self.leases: tuple[Lease, ...] = ()

    def enter_again(self, hold: Hold) -> bool:
        """Be inside a hold that the owner has already; return False where that is being given back."""
        if hold not in self.holds:
            self.holds = (*self.holds, hold)  # first, so that an interruption leaves it again
            if not (hold.blocks or hold.stop_waiting()):
                self.holds = self.holds[:-1]
                return False
            hold.blocks.add(self.mark)
        return True

    def enter(self, holds: Sequence[Hold], resources: Iterable[str]) -> None:
        """Be inside holds, which have all of the resources between them."""
        self.holds = tuple(holds)
        self.asked = None
        self.leases = self.holds[0].leases
        if len(self.holds) > 1 or len(self.leases) > 1:
            self.holds = tuple(dict.fromkeys(holds))
            by_name = {lease.resource: lease for hold in self.holds for lease in hold.leases}
            self.leases = tuple(by_name[resource] for resource in resources)
        for hold in self.holds:
            hold.blocks.add(self.mark)
            for lease in hold.leases:
                lease.enter()
            add(hold)

    @property
    def tokens(self) -> Any:
        """What `with` yields: the token, or the tokens of several resources."""
        if len(self.leases) == 1:
            return self.leases[0].fencing_token
        return tuple(lease.fencing_token for lease in self.leases)

    def let_go(self) -> list[Hold]:
        """Be inside nothing any more; return what is to be given back."""
        over = []
        for hold in reversed(self.holds):
            hold.blocks.discard(self.mark)
            if not hold.blocks and not waits_for_transactions(hold):
                over.append(hold)
        return over

    def leave(self) -> Steps[Loss | None]:
        """Give back what no block is inside any more; return what had been lost before, or None."""
        over = self.let_go()
        return release_hold(over[0]) if len(over) == 1 else release_each(over)


def check_listener(callback: object) -> None:
    """Refuse what `on_lost` cannot call.

    Raises:
        TypeError: it is no plain function.
    """
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_lost calls a plain function with the lease, and {callback!r} is none")


def last_of_ours(entries: list[Entry]) -> Entry | None:
    """Return what this thread, task or greenlet entered last; or else what anybody did."""
    snapshot = tuple(entries)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = (entry for entry in reversed(snapshot) if entry.owner == owner)
    return next(ours, snapshot[-1])


def check_still_held(hold: Hold) -> None:
    """Refuse to go on with a hold that has ended.

    Raises:
        LockLostError: it has.
    """
    for lease in hold.leases:
        lease.check()
        if lease.lost or lease.released:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def note_remint(hold: Hold, asked: Call | None, *, sealed: bool) -> None:
    """Note what has become of a hold for which a new token was asked for, if it was; again has no effect."""
    if asked is not None and asked.answer is not None and sealed and not hold.released:
        hold.remint(asked.answer)
    elif asked is not None:
        hold.grant = asked.answer or hold.grant  # what was not sealed is still to be given back
        # The old token may belong to no lease any more.
        tell(hold.lose("a new token was asked for, and none came"))
