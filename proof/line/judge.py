"""What each history has to keep."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

from .rules import OUTAGE
from .store import Minted, Who

TWICE: Final = "a token twice"
BELOW: Final = "a token below a complete one"
ORDER: Final = "tokens against the order of holding"
OVERLAP: Final = "held by two"
UNFAIR: Final = "minted out of turn"
KEPT: Final = "minted while kept"
STUCK: Final = "a waiter never served"


@dataclass(eq=False, slots=True)
class Held:
    """An acquisition; `since` and `ttl` say how long its owner lives, by the client's monotonic clock."""

    resources: list[int]
    who: Who = 0
    ttl: int = 0
    since: float = 0.0
    began: float = 0.0
    era: int = 0
    until: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)


class Judge:
    """Hears of each request that minted, and of what clients believe; counts what was broken."""

    def __init__(self) -> None:
        self.broken: Counter[str] = Counter()
        self.era = 0
        self.grants = 0
        self.above = 0
        self._given: set[tuple[int, int]] = set()
        self._complete: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self._handed: dict[int, list[Held]] = defaultdict(list)
        self._began: dict[Who, Held] = {}
        self._minted: set[Who] = set()
        self._forced: set[Who] = set()
        self._kept: dict[int, tuple[float, Who, int]] = {}

    def restored(self) -> None:
        self.era += 1
        self._handed.clear()
        self._kept.clear()

    def began(self, held: Held, now: float) -> None:
        held.began, held.era = now, self.era

    def entered(self, held: Held) -> None:
        self._began[held.who] = held

    def minted(self, mint: Minted, now: float) -> None:
        """Hear of a transaction of the store, whether or not its client ever does."""
        self._minted.add(mint.who)
        held = self._began.get(mint.who)
        if mint.ahead and held is not None and held.era == self.era:
            self.broken[UNFAIR] += 1
        for resource, token in mint.tokens.items():
            self.broken[BELOW] += token <= self.above
            until, keeper, _ = self._kept.get(resource, (0.0, 0, 0))
            self.broken[KEPT] += keeper != mint.who and now < until - OUTAGE

    def taken(self, who: Who) -> None:
        """Hear of a forced release: from then on its holder is no holder, if it was one."""
        if who in self._minted:
            self._forced.add(who)
        self._kept = {key: each for key, each in self._kept.items() if each[1] != who}

    def handed(self, held: Held, tokens: dict[int, int], now: float) -> None:
        self.grants += 1
        for resource, token in tokens.items():
            self.broken[TWICE] += (resource, token) in self._given
            self._given.add((resource, token))
            self._check_order(held, resource, token)
            complete = self._complete[resource]
            before = bisect_left(complete, (held.began, 0))
            self.broken[BELOW] += before > 0 and token <= complete[before - 1][1]
            complete.append((now, max(token, complete[-1][1] if complete else 0)))
        self.believes(held, now)

    def _check_order(self, held: Held, resource: int, token: int) -> None:
        own = held.tokens.setdefault(resource, [])
        own.append(token)
        if held.era != self.era:
            return
        line = self._handed[resource]
        for other in line:
            if other is held:
                continue
            theirs = other.tokens[resource]
            apart = max(own) < min(theirs) or max(theirs) < min(own)
            late = held.who not in self._forced and token < max(theirs)
            self.broken[ORDER] += late or not apart
        if held not in line:
            line.append(held)

    def believes(self, held: Held, now: float) -> None:
        """Hear that a client takes its lease for valid until `held.until`, in real time."""
        if not self._counts(held):
            return
        for resource in held.resources:
            for other in self._handed[resource]:
                if other is not held and other.until > now and self._counts(other):
                    self.broken[OVERLAP] += 1

    def _counts(self, held: Held) -> bool:
        return held.era == self.era and held.who not in self._forced

    def kept(self, held: Held, until: float) -> None:
        for resource in held.resources:
            if self._counts(held):
                self._kept[resource] = (until, held.who, self.era)
