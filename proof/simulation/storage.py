"""The storage: rows that the guard watches, transactions with row locks.

What the database does with the statements that the guard makes of a write is modelled here; that the guard
makes such statements of every write is tested with real databases in `tests/guard`. A row's value is the
number of the write that it saw last, so that a write shows which overwrites what its author had not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: What a statement comes to: called with the answer.
Reply = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard asks for; all of it, unless a mutant leaves one out."""

    compares: bool = True  #: a write is refused below the row's fence
    stamps: bool = True  #: a write that is accepted raises the row's fence
    claims: bool = True  #: a holder raises the fence before it reads
    allows_again: bool = True  #: … and not where the fence is at the token: a holder may write again
    at_once: bool = True  #: fence and row are looked at and written in one statement


class Stale(NamedTuple):
    """The answer to a write or claim below the fence."""

    fence: int


@dataclass(eq=False)
class Transaction:
    """Statements that take effect together, and the rows that are locked until then."""

    token: dict[str, int]
    locked: list[str] = field(default_factory=list)
    #: Of each row: what was written and what it was based on, or None for a claim alone.
    changes: list[tuple[str, tuple[int, int] | None]] = field(default_factory=list)
    fences: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    over: bool = False


@dataclass
class Row:
    """One row: the write that it saw last, its fence, the owner of its lock, and the waiting transactions."""

    value: int = 0
    fence: int = 0
    owner: Transaction | None = None
    waiting: deque[tuple[Transaction, Callable[[], None]]] = field(default_factory=deque)


class Storage:
    """All rows. `committed` is told row, token, and what was written on which base (None for a claim)."""

    def __init__(self, rules: Rules, committed: Callable[[str, int, tuple[int, int] | None], None]) -> None:
        self.rules = rules
        self._committed = committed
        self.rows: dict[str, Row] = {}

    def row(self, name: str) -> Row:
        row = self.rows.get(name)
        if row is None:
            row = self.rows[name] = Row()
        return row

    def claim(self, transaction: Transaction, name: str, reply: Reply) -> None:
        self._with_lock(transaction, name, lambda: reply(self._claim(transaction, name)))

    def read(self, transaction: Transaction, name: str, reply: Reply) -> None:
        reply(transaction.values.get(name, self.row(name).value))

    def write(self, transaction: Transaction, name: str, value: int, base: int, reply: Reply) -> None:
        self._with_lock(transaction, name, lambda: reply(self._write(transaction, name, value, base)))

    def append(self, transaction: Transaction, name: str, value: int, reply: Reply) -> None:
        """Write a row on whatever it says then, if its fence is not above the token; or refuse."""

        def action() -> None:
            base = transaction.values.get(name, self.row(name).value)
            reply(self._write(transaction, name, value, base))

        self._with_lock(transaction, name, action)

    def look(self, transaction: Transaction, name: str, reply: Reply) -> None:
        """Answer whether a write would be refused now: not to be relied on."""
        reply(self._refusal(transaction, name))

    def commit(self, transaction: Transaction, reply: Reply) -> None:
        alive = not transaction.over
        if alive:
            self._commit(transaction)
        reply(alive)

    def _commit(self, transaction: Transaction) -> None:
        for name, fence in transaction.fences.items():
            self.row(name).fence = fence
        for name, value in transaction.values.items():
            self.row(name).value = value
        for name, change in transaction.changes:
            self._committed(name, transaction.token[name], change)
        self._end(transaction)

    def roll_back(self, transaction: Transaction) -> None:
        if not transaction.over:
            self._end(transaction)

    def _claim(self, transaction: Transaction, name: str) -> int | Stale:
        refused = self._refusal(transaction, name)
        if refused is not None:
            return refused
        transaction.fences[name] = transaction.token[name]
        transaction.changes.append((name, None))
        return transaction.values.get(name, self.row(name).value)

    def _write(self, transaction: Transaction, name: str, value: int, base: int) -> Stale | None:
        refused = self._refusal(transaction, name) if self.rules.at_once else None
        if refused is not None:
            return refused
        if self.rules.stamps:
            transaction.fences[name] = transaction.token[name]
        transaction.values[name] = value
        transaction.changes.append((name, (value, base)))
        return None

    def _refusal(self, transaction: Transaction, name: str) -> Stale | None:
        fence = transaction.fences.get(name, self.row(name).fence)
        token = transaction.token[name]
        refused = fence > token if self.rules.allows_again else fence >= token
        return Stale(fence) if self.rules.compares and refused else None

    def _with_lock(self, transaction: Transaction, name: str, action: Callable[[], None]) -> None:
        row = self.row(name)
        if transaction.over:
            return  # its connection is gone, and so is the program that waits for the answer
        if row.owner is None or row.owner is transaction:
            if row.owner is None:
                row.owner = transaction
                transaction.locked.append(name)
            action()
        else:
            row.waiting.append((transaction, action))

    def _end(self, transaction: Transaction) -> None:
        transaction.over = True
        for name in transaction.locked:
            row = self.rows[name]
            row.owner = None
            while row.waiting and row.owner is None:
                follower, action = row.waiting.popleft()
                self._with_lock(follower, name, action)
