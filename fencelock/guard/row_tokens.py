"""Which token each row of a statement is written with.

The template gives the row's resource, and the resource its lease. Each lease is checked and remembered once.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.engine import Connection

from fencelock.errors import UnfencedWriteError
from fencelock.guard._tables import FencedTable
from fencelock.guard.leases import writing_on
from fencelock.guard.write_ids import new_write_id
from fencelock.lease import Lease, was_left

NOT_INHERITED: Final = (
    "Leases follow into tasks and asyncio.to_thread, but not into other threads or executors: there, hand "
    "one over with bind(session, lock.lease)"
)
"""What to say to one who holds no lease, and may believe that he does."""


class Tokens:
    """The tokens for the rows of one statement, or of one flush.

    Args:
        connection: what executes it.
        fenced: the table that it writes.
        claiming: whether it is about to claim the rows, which takes a lease of each.

    Attributes:
        write_id: the id of these writes.
        writing: what the connection's transaction writes under.
    """

    __slots__ = ("_candidates", "_claiming", "_found", "_used", "fenced", "write_id", "writing")

    def __init__(self, connection: Connection, fenced: FencedTable, *, claiming: bool = False) -> None:
        self.fenced = fenced
        self.writing = writing_on(connection)
        self.write_id = new_write_id()
        self._claiming = claiming
        self._candidates = self.writing.candidates(connection)
        self._found: dict[tuple[Any, ...], int] = {}
        self._used: list[Lease] = []

    def check(self) -> None:
        """Refuse to go on under a lease that has ended meanwhile.

        Raises:
            LockLostError: if one of them has.
        """
        for lease in self._used:
            lease.token_to_write()

    def need_some(self, resource: str | None = None) -> None:
        """Refuse a write under no lease at all; the resource that it needed is named where it is known.

        Raises:
            UnfencedWriteError: if none is held.
        """
        if self._candidates:
            return
        hint = self.writing.bound_instead or NOT_INHERITED
        if resource is not None and was_left(resource):
            hint = (
                "Where the block that held it was left before this write was sent, call flush() or commit() "
                "inside the block"
            )
        template = self.fenced.template
        if resource is None and not template.columns:
            resource = template.render(())
        lock = (
            f"fenced_lock({resource!r})"
            if resource
            else f"fenced_lock(…) of its resource, {template.text!r} with the row's values,"
        )
        raise UnfencedWriteError(
            f"no lease is held for this write to {self.fenced.name!r}; acquire {lock} around it. {hint}"
        )

    def of_new_row(self) -> int:
        """Return the fence 0 for a row whose resource nobody can have locked yet: the database names it.

        That is a row without a key so far; and until the transaction ends, for nobody else sees it, the row
        with its new key, and what hangs on it.

        Which of the leases it is written under cannot be told, so all of them are waited for.

        Raises:
            UnfencedWriteError: if none is held.
        """
        self.need_some()
        for lease in self._candidates.values():
            self.writing.need(lease)
        return 0

    def of_row(self, values: tuple[Any, ...]) -> int:
        """Return the token of the resource that guards the row with these values, as the template has them.

        Raises:
            UnfencedWriteError: if that resource's lease is not among those held.
            LockLostError: if the lease is known to be lost.
        """
        token = self._found.get(values)
        if token is None:
            token = self._found[values] = self._look_up(values)
        return token

    def _look_up(self, values: tuple[Any, ...]) -> int:
        resource = self.fenced.template.render(values)
        lease = self._candidates.get(resource)
        if lease is None:
            if not self._claiming and resource in self.writing.born:
                return self.of_new_row()
            self.need_some(resource)
            raise UnfencedWriteError(
                f"this write to {self.fenced.name!r} needs the lease of {resource!r}, and held are "
                f"{', '.join(map(repr, self._candidates))}; acquire fenced_lock({resource!r}) around it"
                f"{self.writing.bound_instead and '. '}{self.writing.bound_instead}"
            )
        token = lease.token_to_write()
        self.writing.remember(resource, lease)
        self._used.append(lease)
        return token
