"""Pauses between tries: mostly longer each time, and random, so that clients try at different moments.

The rooms that the simulator runs give the chance, a number between 0 and 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

#: Not the functions of `random`, whose sequence a program may have seeded.
chance: Callable[[], float] = random.SystemRandom().random
_MOST_TRIES = 50  # no power of more tries is needed, and a larger one could overflow


def grown(shortest: float, longest: float, tries: int, growth: float = 1.5) -> float:
    """Return the seconds of a pause after so many tries, before the random factor."""
    return min(longest, shortest * growth ** min(tries, _MOST_TRIES))


def spread(seconds: float, chance: float, least: float = 0.5, most: float = 1.0) -> float:
    """Return the pause, times a factor between `least` and `most`."""
    return seconds * (least + (most - least) * chance)


def randomly(seconds: float) -> float:
    """Return a random pause between half of the seconds and all of them."""
    return spread(seconds, chance())


def pauses(shortest: float, longest: float, growth: float = 1.5) -> Iterator[float]:
    """Yield the seconds to wait before each try."""
    return (randomly(grown(shortest, longest, tries, growth)) for tries in count())
