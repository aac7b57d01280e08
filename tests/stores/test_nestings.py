"""Blocks of one resource inside each other, at random: a store takes no value below the largest token.

A block locks, or runs under a token that it received, or has lost its lease. The newest lease counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from fencelock import (
    Database,
    Lease,
    LockLostError,
    StaleTokenError,
    assert_held,
    fenced_lock,
)
from fencelock.integrations.header import bound, held
from fencelock.lease import held_leases, newest
from fencelock.stores.file import FencedFile

STEPS = st.lists(st.sampled_from(["lock", "lock", "receive", "lose", "leave", "write"]), max_size=14)


class Nesting:
    """The blocks that are open, and the store."""

    def __init__(self, authority: Database, path: Path) -> None:
        self.authority = authority
        self.store = FencedFile(path)
        self.blocks: list[tuple[ExitStack, list[str]]] = []  # each with its kind: lock, receive, or lost
        self.received: list[str] = []
        self.largest = 0

    def _enter(self, kind: str, block: AbstractContextManager[object]) -> None:
        stack = ExitStack()
        stack.enter_context(block)
        self.blocks.append((stack, [kind]))

    def lock(self) -> None:
        lock = fenced_lock("file", authority=self.authority, ttl=60, renew=False, if_lost="warn", timeout=0)
        self._enter("lock", lock)
        self.received.append(held()["Fencing-Token"])
        assert assert_held("file").token == lock.lease.token

    def receive(self) -> None:
        if self.received:
            self._enter("receive", bound(self.received[len(self.blocks) % len(self.received)]))

    def lose(self) -> None:
        """Another holder takes over, and is paused before its write."""
        kinds = [kind for _, kind in self.blocks if kind == ["lock"]]
        for kind in kinds:
            kind[0] = "lost"
        for lease in held_leases() if kinds else ():
            lease._mark_lost("in this test")
        if kinds:
            self.authority.force_release("file")
            with fenced_lock("file", authority=self.authority, reentrant=False, timeout=0):
                pass

    def leave(self) -> None:
        if self.blocks:
            with suppress(LockLostError):
                self.blocks.pop()[0].close()

    def write(self) -> None:
        if not self.blocks:
            return
        try:
            token = assert_held("file").token
            self.store.write(b"%d" % token)
        except (LockLostError, StaleTokenError):
            assert self.blocks[-1][1] != ["lock"], "the holder of the lock is refused"
        else:
            assert token >= self.largest
            self.largest = token


@settings(max_examples=60, deadline=None, database=None)
@given(STEPS)
def test_a_store_takes_no_value_below_the_largest_token(steps: list[str]) -> None:
    with TemporaryDirectory() as folder, Database(f"sqlite:///{folder}/locks.db") as authority:
        nesting = Nesting(authority, Path(folder) / "file")
        for step in [*steps, "write"]:
            getattr(nesting, step)()
        while nesting.blocks:
            nesting.leave()


def test_of_several_leases_of_a_resource_the_newest_counts() -> None:
    one, two, other = Lease("a", 1), Lease("a", 2), Lease("b", 1)
    assert newest([one, two, other]) == newest([two, one, other]) == {"a": two, "b": other}
    two._mark_lost("in this test")
    assert newest([two, one]) == {"a": two}
