"""One entering of a lock: its owner, and the holds that it stands on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencelock._owners import current_owner
from fencelock.authority.base import Authority, Grant
from fencelock.lease import Lease
from fencelock.lock.hold import Hold, add


@dataclass(eq=False, slots=True)
class Block:
    """A block of code in which a lock is held: from its acquisition until it is left.

    Attributes:
        authority: grants what is not held yet.
        timeout: seconds to wait for another holder; None for ever.
        is_with: whether `with` or `async with` enters it.
        is_try: whether the caller does not want to know by whom the lock is held.
        owner: the thread, task or greenlet that enters it.
        mark: stands for it in the holds' blocks, which must not refer to it: a cycle would keep a lock that
            was thrown away alive, and renewed, until the garbage collector comes along.
        thread: in which it is entered.
        given_up: whether its acquisition is to wait no longer.
        had_to_wait: whether its acquisition has waited.
        grant: what was acquired and is no hold yet.
        holds: what it stands on.
        leases: in the order of the lock's resources.
    """

    authority: Authority
    timeout: float | None = None
    is_with: bool = False
    is_try: bool = False
    owner: object = field(default_factory=current_owner)
    mark: object = field(default_factory=object)
    thread: int = field(default_factory=threading.get_ident)
    given_up: bool = False
    had_to_wait: bool = False
    grant: Grant | None = None
    holds: tuple[Hold, ...] = ()
    leases: tuple[Lease, ...] = ()

    def enter_again(self, hold: Hold) -> bool:
        """Enter a hold that the owner has already; return False where that is being given back."""
        if hold not in self.holds:
            self.holds = (*self.holds, hold)  # first, so that an interruption leaves it again
            if not (hold.blocks or hold.stop_waiting()):
                self.holds = self.holds[:-1]
                return False
            hold.blocks.add(self.mark)
            for lease in hold.leases:
                lease.left = False
        return True

    def enter(self, holds: Sequence[Hold], resources: Iterable[str]) -> None:
        """Enter holds, which have all of the resources between them; note that in this context, too."""
        self.holds = tuple(dict.fromkeys(holds))
        self.grant = None
        by_name: dict[str, Lease] = {}
        for hold in self.holds:
            hold.blocks.add(self.mark)
            add(hold)
            by_name.update(zip(hold.grant.resources, hold.leases, strict=True))
        self.leases = tuple([by_name[resource] for resource in resources])

    @property
    def tokens(self) -> Any:
        """What `with` yields: the token, or the tokens of several resources."""
        tokens = tuple([lease.fencing_token for lease in self.leases])
        return tokens[0] if len(tokens) == 1 else tokens


def last_of_ours(blocks: list[Block], *, to_leave: bool = False) -> Block | None:
    """Return what this thread, task or greenlet entered last; or else the last entry of all.

    A thread of a pool may leave what another has entered: then a lost one, before that of a later caller.
    """
    snapshot = tuple(blocks)
    if len(snapshot) < 2:  # noqa: PLR2004 - then there is nothing to choose
        return snapshot[0] if snapshot else None
    owner = current_owner()
    ours = [block for block in snapshot if block.owner == owner]
    lost = [block for block in snapshot if to_leave and any(hold.lost for hold in block.holds)]
    return (ours or lost or snapshot)[-1]
