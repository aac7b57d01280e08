"""One lock or one write that nothing disturbs leads a reader through a small part of the library.

`LIMITS` has what was measured last. More fails, because a path only gets shorter; less fails, too, so that
the limit follows.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import Database, FencedModel, Redlock, _locking, fenced_lock
from fencelock.guard import leases
from proof.servers import Nodes

PACKAGE = f"{Path(fencelock.__file__).parent}/"
#: The passage with the fewest calls counts: early ones connect, and a loop looks twice for a late answer.
PASSAGES = 30


class Figures(NamedTuple):
    """The size of a path, inside `fencelock/`."""

    files: int
    functions: int
    calls: int
    depth: int


LIMITS = {
    "blocking lock, one node": Figures(files=19, functions=98, calls=147, depth=13),
    "asyncio lock, one node": Figures(files=20, functions=99, calls=156, depth=8),
    "blocking lock, SQLite": Figures(files=19, functions=81, calls=132, depth=14),
    "asyncio lock, SQLite": Figures(files=19, functions=86, calls=183, depth=10),
    "flush of one object": Figures(files=9, functions=49, calls=54, depth=8),
}


def is_ours(frame: FrameType) -> bool:
    """Return whether a call counts. Lambdas and comprehensions do not: Python 3.12 inlines some."""
    return frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<")


class Passage:
    """The calls of this thread inside `fencelock/`; resuming a generator is one, too."""

    def __init__(self) -> None:
        self.calls = self.depth = 0
        self.files: dict[str, None] = {}
        self.functions: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; `sys.setprofile` tells of each event."""
        if event != "call" or not is_ours(frame):
            return
        depth, above = 1, frame.f_back
        while above is not None:  # and no sum of calls and returns: greenlets switch in between
            depth, above = depth + is_ours(above), above.f_back
        file, code = frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code
        self.calls, self.depth = self.calls + 1, max(self.depth, depth)
        self.files[file] = None
        self.functions[f"{file}:{code.co_qualname}"] = None

    @property
    def figures(self) -> Figures:
        """The counts of this passage."""
        return Figures(len(self.files), len(self.functions), self.calls, self.depth)


class Passages(list[Passage]):
    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add what happens inside the block."""
        self.append(Passage())
        sys.setprofile(self[-1].note)
        try:
            yield
        finally:
            sys.setprofile(None)


def check(name: str, passages: Sequence[Passage], cache: pytest.Cache) -> None:
    """Compare the passage with the fewest calls with its limit.

    pytest's cache keeps what the last good run entered, so that the message names what came on top.
    """
    shortest = min(passages, key=lambda passage: passage.calls)
    measured, limit, key = shortest.figures, LIMITS[name], f"path/{name}"
    entered = [*shortest.files, *shortest.functions]
    known: list[str] | None = cache.get(key, None)
    new = "unknown" if known is None else ", ".join(each for each in entered if each not in known)
    assert all(now <= most for now, most in zip(measured, limit, strict=True)), (
        f"{name} takes {measured}, and its limit is {limit}. New since this test last passed here: {new}. "
        f"All its files, in order: {', '.join(shortest.files)}"
    )
    shorter = measured._replace(calls=0) != limit._replace(calls=0) or measured.calls < 0.95 * limit.calls
    assert not shorter, f"{name} takes less than its limit. Lower the limit to {measured}"
    cache.set(key, entered)


@pytest.fixture
def node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One node is the default authority."""
    with Redlock(nodes.urls[:1]) as authority:
        authority.init(base=0)
        monkeypatch.setattr(_locking, "_default", authority)
        yield


@pytest.fixture
def sqlite(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file of SQLite is the default authority, by the driver that the test names."""
    with Database(f"{request.param}:///{tmp_path / 'app.db'}") as authority:
        monkeypatch.setattr(_locking, "_default", authority)
        yield


def block() -> Passages:
    """Enter and leave one lock again and again."""
    passages = Passages()
    for _ in range(PASSAGES):
        with passages.measured(), fenced_lock("order:1"):
            pass
    return passages


async def block_async() -> Passages:
    """Enter and leave one lock again and again, in a task."""
    passages = Passages()
    for _ in range(PASSAGES):
        with passages.measured():
            async with fenced_lock("order:1"):
                pass
    return passages


@pytest.mark.usefixtures("node")
def test_a_blocking_lock_on_one_node(cache: pytest.Cache) -> None:
    check("blocking lock, one node", block(), cache)


@pytest.mark.usefixtures("node")
def test_an_asyncio_lock_on_one_node(cache: pytest.Cache) -> None:
    """With what the event loop calls meanwhile."""
    check("asyncio lock, one node", asyncio.run(block_async()), cache)


@pytest.mark.usefixtures("sqlite")
@pytest.mark.parametrize("sqlite", ["sqlite"], indirect=True)
def test_a_blocking_lock_on_sqlite(cache: pytest.Cache) -> None:
    check("blocking lock, SQLite", block(), cache)


@pytest.mark.usefixtures("sqlite")
@pytest.mark.parametrize("sqlite", ["sqlite+aiosqlite"], indirect=True)
def test_an_asyncio_lock_on_sqlite(cache: pytest.Cache) -> None:
    """By a driver for coroutines: with another one, threads would hide the half of it."""
    check("asyncio lock, SQLite", asyncio.run(block_async()), cache)


class Base(DeclarativeBase):
    """The base of the one model."""


class Order(FencedModel, Base):
    """A fenced row."""

    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[int]


@pytest.mark.usefixtures("node")
def test_a_flush_of_one_object(cache: pytest.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one UPDATE, between its load and its COMMIT, in a program that binds no session."""
    monkeypatch.setattr(leases, "_bound", WeakKeyDictionary())
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    passages = Passages()
    with fenced_lock("order:1"), Session(engine) as session:
        order = Order(id=1, paid=0)
        session.add(order)
        session.commit()
        for _ in range(PASSAGES):
            order.paid += 1
            with passages.measured():
                session.flush()
            session.commit()
    engine.dispose()
    check("flush of one object", passages, cache)


def test_a_longer_path_fails_and_says_what_is_new(
    cache: pytest.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever figure grew."""
    passages = Passages()
    with passages.measured():
        fenced_lock("order:1")
    limit = passages[0].figures
    monkeypatch.setitem(LIMITS, "made up", limit)
    check("made up", passages[:1], cache)
    for field in Figures._fields:
        monkeypatch.setitem(LIMITS, "made up", limit._replace(**{field: getattr(limit, field) - 1}))
        with pytest.raises(AssertionError, match=r"last passed here: \. All its files, in order: \w+"):
            check("made up", passages[:1], cache)
    with passages.measured():
        fenced_lock("order:1").cancel()
    with pytest.raises(AssertionError, match=r"New since this test last passed here: .*\.py:\S*cancel"):
        check("made up", passages[1:], cache)


@pytest.mark.parametrize("field", ["files", "functions", "depth"])
def test_a_shorter_path_lowers_its_limit(
    field: str, cache: pytest.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls may vary a little: their limit follows by a twentieth."""
    passages = Passages()
    with passages.measured():
        fenced_lock("order:1")
    limit = passages[0].figures
    monkeypatch.setitem(LIMITS, "made up", limit._replace(**{field: getattr(limit, field) + 1}))
    with pytest.raises(AssertionError, match=rf"Lower the limit to Figures\(files={limit.files}, "):
        check("made up", passages, cache)
