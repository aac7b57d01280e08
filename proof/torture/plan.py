"""How one holder is going to behave: most are quick and well-behaved, the others end leases in every way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from fencelock.lock.options import LockSettings
from proof.torture.history import Manner, Style
from proof.torture.settings import Settings

_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    resources: tuple[str, ...]
    lock: LockSettings
    padding: tuple[str, ...] = ()  #: further names to lock
    work: float = 0.0  #: seconds to hold it before anything is written
    writes: bool = False
    think: float = 0.0  #: seconds between the read and the write
    late: bool = False  #: think between the write and its COMMIT instead
    #: Read and write in one transaction, which keeps the row locked meanwhile; or else claim in one and write
    #: in the next.
    together: bool = False
    style: Style = Style.CLAIM


def names(settings: Settings) -> list[str]:
    return [f"r{number}" for number in range(settings.resources)]


_SHARES: Final = {
    Manner.QUICK: 84,
    Manner.OVERSTAYING: 2,
    Manner.BRIEF: 4,
    Manner.RENEWED: 2,
    Manner.SEVERAL: 3,
    Manner.FAIR: 5,
    Manner.LARGE: 1,
}
#: What the naive control can do.
_SIMPLE: Final = {manner: _SHARES[manner] for manner in (Manner.QUICK, Manner.OVERSTAYING, Manner.BRIEF)}
#: What a database can do, which keeps no waiting line. In a store all clients wait in turn.
_WITHOUT_A_LINE: Final = {
    manner: share for manner, share in _SHARES.items() if manner not in {Manner.FAIR, Manner.LARGE}
}
#: How many more a large lock has, and of how many characters: more than the buffers of a socket hold.
_MANY: Final = 600
_LENGTH: Final = 250
_SHARE_TOGETHER: Final = 0.3
_SHARE_LATE: Final = 0.3
#: How much more often than in any other style.
_CLAIMS: Final = 4


def choose_plan(rng: random.Random, settings: Settings) -> Plan:
    """Return what to do next. Some resources are much more wanted than others."""
    shares = _SHARES if settings.on_nodes else _WITHOUT_A_LINE
    if not settings.quorum:
        shares = _SIMPLE
    shares = {manner: share for manner, share in shares.items() if manner in settings.manners}
    if "partial-write" not in settings.faults:
        shares.pop(Manner.LARGE, None)
    if settings.manners != tuple(Manner):  # chosen ones are equally frequent
        shares = dict.fromkeys(shares, 1)
    (manner,) = rng.choices(list(shares), list(shares.values()))
    resources, lock, work = _hold(manner, rng, settings)
    weights = [_CLAIMS if style is Style.CLAIM else 1 for style in settings.styles]
    (style,) = rng.choices(settings.styles, weights)
    return Plan(
        resources,
        lock,
        work=work,
        writes=rng.random() < settings.writes,
        think=rng.expovariate(1 / settings.think) if settings.think else 0.0,
        late=rng.random() < _SHARE_LATE,
        padding=_padding(rng) if manner is Manner.LARGE else (),
        together=rng.random() < _SHARE_TOGETHER or style is Style.GATE,
        style=style,
    )


def _hold(
    manner: Manner, rng: random.Random, settings: Settings
) -> tuple[tuple[str, ...], LockSettings, float]:
    first, *more = (f"r{int(settings.resources * rng.random() ** 2)}" for _ in range(rng.randint(2, 4)))
    lock: LockSettings = {"ttl": settings.ttl, "timeout": _TIMEOUT, "renew": False}
    part = settings.ttl * rng.uniform(0.1, 0.4)
    match manner:
        case Manner.OVERSTAYING:
            return (first,), {**lock, "ttl": part}, part * rng.uniform(1.1, 3.0)
        case Manner.BRIEF:
            return (first,), {**lock, "ttl": rng.uniform(0.01, 0.04), "timeout": 0.5}, 0.0
        case Manner.RENEWED:
            return (first,), {**lock, "ttl": part, "renew": True}, part * rng.uniform(1.1, 3.0)
        case Manner.SEVERAL if {*more} - {first}:
            return tuple(dict.fromkeys([first, *more])), lock, 0.0
        case _:
            return (first,), {**lock, "fair": manner is Manner.FAIR}, 0.0


def _padding(rng: random.Random) -> tuple[str, ...]:
    """Return names that no other plan has."""
    prefix = f"padding {rng.getrandbits(64):x} "
    return tuple(f"{prefix}{number}".ljust(_LENGTH, "x") for number in range(_MANY))
