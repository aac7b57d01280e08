"""One time that a lock was entered, and what it is inside."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencelock._owners import current_owner
from fencelock.errors import LockLostError
from fencelock.lease import Lease
from fencelock.lock.hold import Hold, add
from fencelock.lock.releasing import Loss, release_each, waits_for_transactions
from fencelock.lock.steps import Acquisition, Step, Steps
from fencelock.renewal.schedule import tell


@dataclass(eq=False, slots=True)
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

    owner: object = field(default_factory=current_owner)
    mark: object = field(default_factory=object)
    asked: Acquisition | None = None
    holds: tuple[Hold, ...] = ()
    leases: tuple[Lease, ...] = ()

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
        self.holds = tuple(dict.fromkeys(holds))
        self.asked = None
        by_name = {lease.resource: lease for hold in self.holds for lease in hold.leases}
        self.leases = tuple([by_name[resource] for resource in resources])
        for hold in self.holds:
            hold.blocks.add(self.mark)
            for lease in hold.leases:
                lease.enter()
            add(hold)

    @property
    def tokens(self) -> Any:
        """What `with` yields: the token, or the tokens of several resources."""
        tokens = tuple([lease.fencing_token for lease in self.leases])
        return tokens[0] if len(tokens) == 1 else tokens

    def leave(self) -> Steps[Loss | None]:
        """Give back what no block is inside any more; return what had been lost before, or None."""
        over = []
        for hold in reversed(self.holds):
            hold.blocks.discard(self.mark)
            if not hold.blocks and not waits_for_transactions(hold):
                over.append(hold)
        return release_each(over)


def check_listener(callback: object) -> None:
    """Refuse with a TypeError what `on_lost` cannot call."""
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_lost calls a plain function with the lease, and {callback!r} is none")


def last_of_ours(entries: list[Entry]) -> Entry | None:
    """Return what this thread, task or greenlet entered last; or else the last entry of all."""
    snapshot = tuple(entries)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = (entry for entry in reversed(snapshot) if entry.owner == owner)
    return next(ours, snapshot[-1])


def check_still_held(hold: Hold) -> None:
    """Refuse with a LockLostError to go on with a hold that has ended."""
    for lease in hold.leases:
        lease.check()
        if lease.lost or lease.released:
            raise LockLostError(f"the lease of {lease.resource!r} has ended; acquire the lock again")


def note_remint(hold: Hold, asked: Step | None, *, sealed: bool) -> None:
    """Note what has become of a hold for which a new token was asked for, if it was; again has no effect."""
    if asked is not None and asked.answer is not None and sealed and not hold.released:
        hold.remint(asked.answer)
    elif asked is not None:
        hold.grant = asked.answer or hold.grant  # what was not sealed is still to be given back
        # The old token may belong to no lease any more.
        tell(hold.lose("a new token was asked for, and none came"))
