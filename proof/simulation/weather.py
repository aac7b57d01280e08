"""What a seed draws: how often which fault happens, how slow the network is, how wrong the clocks are.

Each is absent from some seeds and frequent in others. Some holes need a calm network, others a wild one; with
everything at a medium rate in every seed neither would be found.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Faults of nodes and clients, and how often each happens at most, per simulated second.
MOST = {
    "client pause": 3.0,
    "client crash": 1.5,
    "client clock": 4.0,
    "node pause": 2.0,
    "node clock": 3.0,
    "node restart": 1.0,
    "node blank": 1.0,
    "node rollback": 1.0,
    "node flush": 1.0,
    "node follows": 1.0,
    "hash evicted": 0.5,
    "lock evicted": 60.0,
    "partition": 2.0,
    "snapshot": 8.0,
    "database cut": 4.0,
}
#: With clocks like these, mutual exclusion is promised, too.
SANE_RATE = 0.003
_OF_CLOCKS = ("client clock", "node clock", "lock evicted")


@dataclass(frozen=True, slots=True)
class Weather:
    """The conditions of one run."""

    rates: dict[str, float]  #: how often each kind of fault happens, per second
    latency: float  #: seconds that a message usually takes, one way
    late: float  #: share of messages that take much longer
    lateness: float  #: seconds that these take on the average
    lost: float  #: share of messages that never arrive
    doubled: float  #: share of messages that arrive twice
    sane_clocks: bool  #: whether all clocks go evenly, at about the same rate
    changes: float  #: changes of nodes, per second
    resources: tuple[str, ...]
    ttl: float
    think: float  #: seconds between two acquisitions of a client, on the average
    work: float  #: seconds that a lease is used, on the average
    #: Whether clients, the network and a majority of the nodes are well all the time: then no healthy holder
    #: loses a lease, and no client is told that its list of nodes is wrong.
    well: bool = False
    in_order: bool = False  #: whether no message overtakes another on its connection


#: The first and the third share a stripe.
RESOURCES = ("r", "s", "r672")


def draw(rng: random.Random) -> Weather:
    def sometimes(probability: float, most: float) -> float:
        return rng.uniform(0.0, most) if rng.random() < probability else 0.0

    sane = rng.random() < 0.5
    rates = {kind: sometimes(0.4, most) for kind, most in MOST.items()}
    rates["snapshot"] = MOST["snapshot"] * (0.1 + rng.random())
    if sane:
        rates |= dict.fromkeys(_OF_CLOCKS, 0.0)
    if not sane and rng.random() < 0.4:
        # A rush: locks end while they are decided upon, and all clients want the same.
        return Weather(
            rates=rates | {"lock evicted": rng.uniform(100.0, 600.0), "client pause": 0.0},
            latency=0.002,
            late=rng.uniform(0.05, 0.4),
            lateness=rng.choice((0.005, 0.02)),
            lost=sometimes(0.3, 0.1),
            doubled=sometimes(0.5, 0.2),
            sane_clocks=False,
            changes=0.0,
            resources=RESOURCES[:1],
            ttl=0.5,
            think=0.0,
            work=0.001,
        )
    return Weather(
        rates=rates,
        latency=rng.choice((0.0002, 0.0005, 0.002)),
        late=sometimes(0.5, 0.3),
        lateness=rng.choice((0.005, 0.05, 0.5)),
        lost=sometimes(0.5, 0.1),
        doubled=sometimes(0.5, 0.2),
        sane_clocks=sane,
        changes=sometimes(0.2, 0.5),
        resources=RESOURCES[: rng.choice((1, 2, 3, 3))],
        ttl=rng.choice((0.1, 0.5, 1.0, 2.0)),
        think=rng.choice((0.0, 0.002, 0.02)),
        work=rng.choice((0.0005, 0.002, 0.01)),
    )


def draw_well(rng: random.Random) -> Weather:
    """Return conditions in which nothing goes wrong by itself."""
    return Weather(
        rates=dict.fromkeys(MOST, 0.0),
        latency=rng.choice((0.0002, 0.0005, 0.002)),
        late=rng.choice((0.0, 0.1)),
        lateness=0.005,
        lost=0.0,
        doubled=0.0,
        sane_clocks=True,
        changes=0.0,
        resources=RESOURCES[: rng.choice((1, 3))],
        ttl=rng.choice((1.0, 2.0)),
        think=rng.choice((0.02, 0.1)),
        work=rng.choice((0.002, 0.1)),
        well=True,
    )
