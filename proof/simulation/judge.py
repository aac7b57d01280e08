"""Watches a run, and says which promise was broken first.

It knows everything at once, as no process in the world does: what has been granted and when, and what the
storage has committed in which order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fencelock.errors import FencelockError, MembershipError

P1 = "P1: the same token twice"
P2 = "P2: a token below one that was complete before"
STALE = "a stale write was accepted"
LOST_UPDATE = "an update was lost"
REFUSED = "a holder was refused, although the storage had seen no later one"
OVERLAP = "two held the lock at once, while clocks were right"
AGAIN = "a node voted again in an epoch that it has forgotten"
LOST_LEASE = "a lease was lost, although its holder and a majority were well"
WRONG_LIST = "a client with the right list was told that it is wrong"
LEFT = "a lock was left that nobody holds"
TWICE = "a slot was held twice, while clocks were right"
BESIDE = "a reader was beside a writer, while clocks were right"
STARVED = "readers kept a writer waiting"
EXHAUSTED = "a client that lied stopped the locks of others"
STUCK = "nobody could go on after the faults had ended"


class Violated(Exception):  # noqa: N818 - it is a finding
    """A promise was broken."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise


class Holding(Protocol):
    @property
    def owner(self) -> str:
        """The holder's name."""

    def is_valid(self) -> bool:
        """Whether its holder may believe, by its own clock, that no other client holds the lock."""


@dataclass
class _Record:
    seen: set[int] = field(default_factory=set)
    largest: int = 0
    holder: Holding | None = None
    #: The largest token that the storage has seen for its row, and the write that the row saw last.
    fence: int = 0
    value: int = 0


class Judge:
    """Notes what happens; raises `Violated` at the first broken promise."""

    def __init__(self, *, exclusion: bool, well: bool) -> None:
        self._exclusion = exclusion
        self._well = well
        self._records: dict[str, _Record] = {}
        self.acquisitions = 0
        self.reminted = 0
        self.writes = 0
        self.refused = 0

    def _record(self, resource: str) -> _Record:
        record = self._records.get(resource)
        if record is None:
            record = self._records[resource] = _Record()
        return record

    def floors(self, resources: tuple[str, ...]) -> tuple[int, ...]:
        """Return the largest tokens so far: what begins now must exceed them."""
        return tuple([self._record(resource).largest for resource in resources])

    def granted(
        self, resources: tuple[str, ...], tokens: tuple[int, ...], floors: tuple[int, ...], holding: Holding
    ) -> None:
        self.acquisitions += 1
        for resource, token, floor in zip(resources, tokens, floors, strict=True):
            record = self._record(resource)
            if token in record.seen:
                raise Violated(P1, f"{token} of {resource!r}, to {holding.owner}")
            if token <= floor:
                raise Violated(P2, f"{token} of {resource!r} after {floor}, to {holding.owner}")
            record.seen.add(token)
            record.largest = max(record.largest, token)
            other = record.holder
            apart = other is None or other is holding or not (other.is_valid() and holding.is_valid())
            if self._exclusion and not apart and other is not None:
                raise Violated(OVERLAP, f"{resource!r} by {holding.owner} and {other.owner}")
            record.holder = holding

    def ended(self, holding: Holding, why: str) -> None:
        if self._well:
            raise Violated(LOST_LEASE, f"by {holding.owner}: {why}")

    def failed(self, owner: str, error: FencelockError) -> None:
        if self._well and isinstance(error, MembershipError):
            raise Violated(WRONG_LIST, f"{owner}: {error}")

    def turned_away(self, row: str, token: int) -> None:
        self.refused += 1
        if token >= self._record(row).fence:
            raise Violated(REFUSED, f"{token} of {row!r}")

    def committed(self, row: str, token: int, change: tuple[int, int] | None) -> None:
        """Note what the storage has committed: a claim, or a write on the base of an earlier one."""
        record = self._record(row)
        if token < record.fence:
            raise Violated(STALE, f"{row!r} took {token} after {record.fence}")
        record.fence = token
        if change is None:
            return
        value, base = change
        if base != record.value:
            raise Violated(LOST_UPDATE, f"write {value} of {row!r} knew {base}, and not {record.value}")
        record.value = value
        self.writes += 1
