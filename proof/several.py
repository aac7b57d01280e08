"""The model of callers that want several names in a database: every schedule of a few of them.

python -m proof.several

A caller that finds one of its names occupied waits in the queue of the *first* one, in the order of names. A
released name is kept for the first in its queue. If that caller then finds another of its names occupied, it
waits for that one, and keeps the free names before it. A kept name is no lease: it only makes others
wait, and it ends by itself after a moment.

The model tells whether the line is alive. From each state some caller can still acquire all of its names,
although no kept name has ended by itself (unless its caller died). In the control each caller has an order of
its own: two callers keep from each other what they need, until it ends by itself.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

#: The names that each caller wants.
CASES: Final = {
    "one name": ("a", "a", "a"),
    "overlapping sets": ("ab", "bc", "ca"),
    "the same set": ("abc", "abc", "abc"),
    "one name beside several": ("abc", "b", "c"),
    "sets in a chain": ("ab", "bc", "cd"),
}
FREE: Final = ""


class Name(NamedTuple):
    """A name: which caller has it, by a lease or because it is kept, and which callers wait for it."""

    owner: str = FREE
    queue: tuple[str, ...] = ()

    def passed_on(self) -> Name:
        """Return the name after its release: it is kept for the first in its queue."""
        if not self.queue:
            return Name()
        return Name(self.queue[0], self.queue[1:])


class State(NamedTuple):
    """All names, and what each caller does."""

    names: tuple[tuple[str, Name], ...]
    callers: tuple[tuple[str, str], ...]  # asks, holds, done, gone, dead

    def name(self, which: str) -> Name:
        return dict(self.names)[which]

    def change(self, caller: str, does: str, **names: Name) -> State:
        changed, doing = {**dict(self.names), **names}, {**dict(self.callers), caller: does}
        return State(tuple(sorted(changed.items())), tuple(sorted(doing.items())))


class Model:
    """The moves of callers that want these names. Faults: callers that die, or give up."""

    def __init__(self, wanted: tuple[str, ...], *, in_order: bool = True, faults: bool = False) -> None:
        self.wanted = dict(zip("ABCD", wanted, strict=False))
        self._in_order, self._faults = in_order, faults

    def start(self) -> State:
        names = sorted({name for wanted in self.wanted.values() for name in wanted})
        return State(
            tuple((name, Name()) for name in names), tuple((caller, "asks") for caller in self.wanted)
        )

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the next states, and what led there."""
        for caller, does in state.callers:
            wanted = {name: state.name(name) for name in self.wanted[caller]}
            own = {name: its for name, its in wanted.items() if its.owner == caller}
            if does == "asks":
                yield from self._asking(state, caller, wanted)
                if self._faults:
                    yield "gives up", state.change(caller, "gone", **_without(wanted, caller))
                    yield "dies", state.change(caller, "dead")
            elif does == "holds":
                passed = {name: its.passed_on() for name, its in own.items()}
                yield "releases", state.change(caller, "done", **passed)
                if self._faults:
                    yield "dies", state.change(caller, "dead")
            elif does == "dead" and own:  # what it had ends by itself
                yield "ends", state.change(caller, does, **{n: its.passed_on() for n, its in own.items()})

    def _asking(self, state: State, caller: str, wanted: dict[str, Name]) -> Iterator[tuple[str, State]]:
        order = sorted(wanted) if self._in_order else list(wanted)
        occupied = [name for name in order if wanted[name].owner not in {FREE, caller}]
        dead = {each for each, does in state.callers if does == "dead"}
        if not occupied:
            held = {name: Name(caller, _left(its, caller)) for name, its in wanted.items()}
            yield "acquires", state.change(caller, "holds", **held)
            return
        first = occupied[0]
        was_called = any(its.owner == caller for its in wanted.values())
        before = order[: order.index(first)] if was_called else []
        kept = {
            name: Name(caller, _left(wanted[name], caller)) for name in before if wanted[name].owner == FREE
        }
        if caller not in wanted[first].queue and wanted[first].owner not in dead:
            kept[first] = wanted[first]._replace(queue=(*wanted[first].queue, caller))
        if kept:
            yield "waits", state.change(caller, "asks", **kept)


def _left(name: Name, caller: str) -> tuple[str, ...]:
    return tuple(each for each in name.queue if each != caller)


def _without(wanted: dict[str, Name], caller: str) -> dict[str, Name]:
    """Return the names after a caller gave up: it passes on what was kept for it, and leaves the queues."""
    left = {name: its._replace(queue=_left(its, caller)) for name, its in wanted.items()}
    return {name: its.passed_on() if its.owner == caller else its for name, its in left.items()}


def stuck(model: Model) -> tuple[int, list[State]]:
    """Return how many states there are, and those in which callers ask and none can ever acquire."""
    before: dict[State, set[State]] = {}
    todo, good = deque([model.start()]), set[State]()
    before[todo[0]] = set()
    while todo:
        state = todo.popleft()
        for move, after in model.moves(state):
            if after not in before:
                before[after] = set()
                todo.append(after)
            before[after].add(state)
            if move == "acquires":
                good.add(state)
    alive, todo = set(good), deque(good)
    while todo:
        for earlier in before[todo.popleft()] - alive:
            alive.add(earlier)
            todo.append(earlier)
    asks = (state for state in before if any(does == "asks" for _, does in state.callers))
    return len(before), [state for state in asks if state not in alive]


def main() -> None:
    """Try all cases, and the control."""
    failed = False
    for (case, wanted), faults in itertools.product(CASES.items(), (False, True)):
        count, found = stuck(Model(wanted, faults=faults))
        failed = failed or bool(found)
        print(f"{case}{', with faults' if faults else ''}: {count} states, {len(found)} of them stuck")
    count, found = stuck(Model(("ab", "ab", "ba"), in_order=False))
    failed = failed or not found
    print(f"control, each in its own order: {count} states, {len(found)} of them stuck")
    sys.exit(failed)


if __name__ == "__main__":
    main()
