"""Rules that are left out, and the weather in which that shows soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .etcd import Etcd, EtcdClient, EtcdOperator
from .judge import BELOW, KEPT, ORDER, OVERLAP, STUCK, TWICE, UNFAIR, Judge
from .rules import ETCD, SHIPPED, ZOOKEEPER, Rules
from .world import World
from .zookeeper import ZooKeeper, ZooKeeperClient, ZooKeeperOperator

STORES: Final = (ETCD, ZOOKEEPER)


@dataclass(frozen=True, slots=True)
class Control:
    """One rule left out, and the promises one of which that has to break."""

    store: str
    rules: Rules
    breaks: frozenset[str]
    weather: Mapping[str, Any] = field(default_factory=dict)
    #: Where to begin, because a break is rare.
    start: int = 0

    def first(self, seeds: Iterable[int]) -> tuple[int, Counter[str]] | None:
        """Return the first seed that breaks one of them, and what it breaks."""
        for seed in (self.start + seed for seed in seeds):
            broken = +play(seed, self.store, self.rules, **self.weather).broken
            if self.breaks & broken.keys():
                return seed, broken
        return None


def play(seed: int, store: str, rules: Rules = SHIPPED, **options: Any) -> Judge:
    """Play the history of a seed."""
    if store == ETCD:
        return World(seed, Etcd(rules), rules, **options).play(EtcdClient, EtcdOperator)
    world = World(seed, ZooKeeper(rules), rules, fifo=True, **options)
    return world.play(ZooKeeperClient, ZooKeeperOperator)


def _both(rules: Rules, *breaks: str, **weather: float) -> dict[str, Control]:
    return {store: Control(store, rules, frozenset(breaks), weather) for store in STORES}


def _controls() -> dict[str, Control]:
    of_both = {
        "tokens are places in line": _both(Rules(source="place"), BELOW, TWICE, ORDER),
        "tokens without a clock": _both(Rules(source="own + 1"), BELOW, TWICE),
        "base not compared": _both(Rules(compares_base=False), BELOW),
        "lines entered one by one": _both(Rules(enters_at_once=False), STUCK, resources=3, idle=50),
        "entry not compared": _both(Rules(entry="none"), UNFAIR, ORDER),
    }
    found = {f"{store}: {name}": its[store] for name, its in of_both.items() for store in STORES}
    moving = {"resources": 1, "crew": 3, "restores": 0, "moves": 1, "idle": 50, "forces": 0.01, "pauses": 0}
    long = {"restores": 0, "resources": 1, "crew": 3, "holds": 0.97, "idle": 50, "forces": 0.01}
    for store, name, rules, breaks, weather in (
        (
            ETCD,
            "marks compared by revision",
            Rules(compares_value=False),
            {BELOW, ORDER},
            {"resources": 1, "crew": 3, "restores": 8, "holds": 0.5, "moves": 0, "idle": 150, "rough": 0.02},
        ),
        (
            ETCD,
            "a move in doubt renews one lease",
            Rules(keeps_both=False),
            {OVERLAP},
            {**moving, "holds": 0.97, "rough": 0.5},
        ),
        (
            ETCD,
            "a move from any lease",
            Rules(moves_by_lease=False),
            {OVERLAP},
            {**moving, "holds": 0.99, "rough": 0.35},
        ),
        (
            ETCD,
            "a lease that exists counts from the retry",
            Rules(counts_from_first=False),
            {OVERLAP},
            {**long, "moves": 0, "rough": 0.5, "pauses": 0},
        ),
        (
            ZOOKEEPER,
            "marks read before the entry stands",
            Rules(reads_in_line=False),
            {BELOW, ORDER},
            {"restores": 0, "resources": 1, "idle": 3000},
        ),
        (
            ZOOKEEPER,
            "a base remembered beyond its session",
            Rules(forgets_base=False),
            {BELOW},
            {"resources": 1, "crew": 3, "restores": 6, "idle": 50, "raises": 8},
        ),
        (
            ZOOKEEPER,
            "one missing entry made anew alone",
            Rules(all_anew=False),
            {STUCK},
            {"restores": 0, "resources": 3, "crew": 4, "forces": 40},
        ),
        (
            ZOOKEEPER,
            "sessions live on after they were cut off",
            Rules(retires=False),
            {STUCK},
            {"restores": 5},
        ),
        (ZOOKEEPER, "the whole session is valid", Rules(part=1.0), {OVERLAP}, {**long, "pauses": 10}),
        (
            ZOOKEEPER,
            "versions remembered beyond their connection",
            Rules(forgets_known=False),
            {BELOW, ORDER},
            {"resources": 1, "crew": 3, "restores": 8, "idle": 50},
        ),
        (
            ZOOKEEPER,
            "prune leaves no sign",
            Rules(prune_raises=False),
            {BELOW, ORDER},
            {"restores": 0, "resources": 1, "idle": 3000},
        ),
        (
            ZOOKEEPER,
            "no look at the mark after entering",
            Rules(compares_mark=False),
            {BELOW, ORDER},
            {"restores": 0, "resources": 1, "crew": 4, "idle": 20, "holds": 0.5},
        ),
        (
            ZOOKEEPER,
            "what is kept is pruned",
            Rules(spares_kept=False),
            {KEPT},
            {"restores": 0, "resources": 1, "idle": 3000},
        ),
    ):
        start = {"prune leaves no sign": 1500, "no look at the mark after entering": 2650}.get(name, 0)
        found[f"{store}: {name}"] = Control(store, rules, frozenset(breaks), weather, start)
    return found


CONTROLS: Final = _controls()
