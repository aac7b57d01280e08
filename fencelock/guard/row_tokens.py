"""Which token each row of a statement is written with.

The template gives the row's resource, and the resource its lease. Each lease is checked and remembered once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.engine import Connection

from fencelock.errors import UnfencedWriteError
from fencelock.guard._tables import FencedTable
from fencelock.guard.leases import Writer, writer_of
from fencelock.guard.open_gates import refuse_beside_gate
from fencelock.lease import Lease, was_left

if TYPE_CHECKING:
    from fencelock.guard.flushes import LoadedIds

NOT_INHERITED: Final = (
    "Leases follow into tasks and asyncio.to_thread, but not into other threads or executors: there, hand "
    "one over with bind(session, lock.lease)"
)
"""What to say to one who holds no lease, and may believe that he does."""


class Tokens:
    """The tokens for the rows of one statement: resolves, checks and remembers each lease once.

    Args:
        connection: what executes it.
        fenced: the table that it writes.
        options: its execution options.
        writer: the connection's, where that is known.
        claiming: whether it is about to claim the rows, which leases in doubt are good for.

    Attributes:
        loaded: for a flush, the write ids that the objects were loaded with.
        write_id: for a flush, the id of its writes.
        writer: what the connection's transaction writes under.
    """

    __slots__ = (
        "_candidates",
        "_claiming",
        "_connection",
        "_found",
        "_options",
        "_used",
        "fenced",
        "loaded",
        "write_id",
        "writer",
    )

    def __init__(
        self,
        connection: Connection,
        fenced: FencedTable,
        options: Mapping[str, Any],
        *,
        writer: Writer | None = None,
        claiming: bool = False,
    ) -> None:
        self.fenced = fenced
        self._connection = connection
        self._options = options
        self._claiming = claiming
        self.writer = writer or writer_of(connection)
        self._candidates = self.writer.candidates(connection)
        self._found: dict[tuple[Any, ...], int] = {}
        self._used: list[Lease] = []
        self.loaded: LoadedIds | None = None
        self.write_id = 0

    def serves(self, writer: Writer) -> bool:
        """Tell whether leases have been found, and in this transaction: a listener may have begun another.

        Raises:
            LockLostError: if one of them has ended since.
        """
        if not self._used or self.writer is not writer:
            return False
        for lease in self._used:
            lease.token_to_write(claiming=self._claiming)
        return True

    @property
    def none_held(self) -> bool:
        """Whether there is no lease that could guard anything."""
        return not self._candidates

    def need_some(self, resource: str | None = None) -> None:
        """Refuse a write under no lease at all; the resource that it needed is named where it is known.

        Raises:
            UnfencedWriteError: if none is held.
        """
        if not self.none_held:
            return
        hint = self.writer.bound_instead or NOT_INHERITED
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
            self.writer.need(lease, self._connection)
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
            if not self._claiming and self.writer.has_born(resource):
                return self.of_new_row()
            self.need_some(resource)
            raise UnfencedWriteError(
                f"this write to {self.fenced.name!r} needs the lease of {resource!r}, and held are "
                f"{', '.join(map(repr, self._candidates))}; acquire fenced_lock({resource!r}) around it"
                f"{self.writer.bound_instead and '. '}{self.writer.bound_instead}"
            )
        token = lease.token_to_write(claiming=self._claiming)
        if self.writer.remembered.get(resource) is not lease:
            refuse_beside_gate(self._connection, resource, lease)
        self.writer.remember(resource, lease, self._connection, claiming=self._claiming)
        self._used.append(lease)
        return token
