"""From times and quantities to places on a chart, and to words.

Horizontal places are per cent of a chart's width, so that one page fits a laptop, a telephone and paper
without a script. Vertical places are pixels. Times are nanoseconds of the history's clock until they are
words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
#: Keeps a number and its unit on one line.
_SPACE = "\u00a0"
_STEPS_BELOW_A_MINUTE = (1, 2, 5)
_STEPS_OF_MINUTES = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1440)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a run, as wide as a chart.

    Attributes:
        origin: when the run began: what the axis counts from.
        began: the left edge.
        ended: the right edge, later than the left one.
    """

    origin: int
    began: int
    ended: int

    def __post_init__(self) -> None:
        if self.ended <= self.began:
            raise ValueError(f"a window must end after it began, not at {self.ended} after {self.began}")

    @property
    def length(self) -> int:
        """How long it is, in nanoseconds."""
        return self.ended - self.began

    def overlaps(self, began: int, ended: int) -> bool:
        """Whether something that lasted so long is seen in it."""
        return began < self.ended and ended >= self.began

    def place(self, moment: int) -> float:
        """Return where a moment lies, in per cent of the width; outside of 0 … 100 where it is not seen."""
        return round(100 * (moment - self.began) / self.length, 3)

    def stretch(self, began: int, ended: int) -> tuple[float, float]:
        """Return the left edge and the width of what is seen of a stretch of time, in per cent."""
        left, right = self.place(max(began, self.began)), self.place(min(ended, self.ended))
        return left, round(max(right - left, 0), 3)

    def time(self, moment: int) -> str:
        """Say when something was, counted from the beginning of the run."""
        return since(self.origin, moment)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Return where round times lie, and their names, counted from the beginning of the run."""
        step = _round_step(self.length / most)
        first = -(-(self.began - self.origin) // step)
        last = (self.ended - self.origin) // step
        return [
            (self.place(self.origin + number * step), clock(number * step, step))
            for number in range(first, last + 1)
        ]


def _round_step(least: float) -> int:
    """Return the smallest round length of time that is not below `least`."""
    return next(step for step in _round_steps() if step >= least)


def _round_steps() -> Iterator[int]:
    for power in range(3, 11):
        yield from (factor * 10**power for factor in _STEPS_BELOW_A_MINUTE if factor * 10**power < MINUTE)
    yield from (minutes * MINUTE for minutes in _STEPS_OF_MINUTES)
    days = 1
    while True:
        days *= 2
        yield days * 1440 * MINUTE


def clock(since_origin: int, step: int) -> str:
    """Name a time of the run for an axis whose ticks are `step` apart: `12.4 s`, `3:30`."""
    if step >= 10 * SECOND:
        sign, seconds = "-" if since_origin < 0 else "", abs(since_origin) // SECOND
        return f"{sign}{seconds // 60}:{seconds % 60:02}"
    decimals = max(0, 9 - int(math.log10(step)))
    return f"{since_origin / SECOND:.{decimals}f} s"


def since(origin: int, moment: int) -> str:
    """Say how long after the beginning of a run something was: `12.345 s`."""
    return f"{(moment - origin) / SECOND:.3f}{_SPACE}s"


def duration(nanoseconds: float) -> str:
    """Say how long something took, with about three digits: `870 µs`, `12.3 ms`, `4.56 s`, `20 min 5 s`."""
    for unit, name in ((MICROSECOND, "µs"), (MILLISECOND, "ms"), (SECOND, "s")):
        if abs(nanoseconds) < 999.5 * unit and unit < SECOND:
            return f"{_three_digits(nanoseconds / unit)}{_SPACE}{name}"
    if abs(nanoseconds) < MINUTE:
        return f"{_three_digits(nanoseconds / SECOND)}{_SPACE}s"
    minutes, seconds = divmod(round(nanoseconds / SECOND), 60)
    if minutes < 60:
        return f"{minutes}{_SPACE}min {seconds}{_SPACE}s"
    return f"{minutes // 60}{_SPACE}h {minutes % 60}{_SPACE}min"


def _three_digits(quantity: float) -> str:
    size = abs(quantity)
    return f"{quantity:.2f}" if size < 9.995 else f"{quantity:.1f}" if size < 99.95 else f"{quantity:.0f}"


def count(number: int, one: str, many: str = "") -> str:
    """Say how many there are of something: `1 write`, `1,204 writes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True, slots=True)
class LogScale:
    """Heights of quantities that differ by powers of ten.

    Attributes:
        least: the power of ten at the bottom.
        most: the power of ten at the top.
        top: pixels above the scale.
        height: pixels from the bottom to the top.
    """

    least: int
    most: int
    top: float
    height: float

    @classmethod
    def around(cls, smallest: float, largest: float, *, top: float, height: float) -> LogScale:
        """Make a scale of whole powers of ten that holds both."""
        least = math.floor(math.log10(max(smallest, 1)))
        most = math.ceil(math.log10(max(largest, 1)))
        return cls(least, max(most, least + 1), top, height)

    def place(self, quantity: float) -> float:
        """Return how far below the chart's top edge a quantity is."""
        power = math.log10(max(quantity, 10**self.least))
        share = (power - self.least) / (self.most - self.least)
        return round(self.top + self.height * (1 - share), 1)

    def ticks(self) -> list[tuple[float, float]]:
        """Return the powers of ten, each with its place."""
        return [(self.place(10.0**power), 10.0**power) for power in range(self.least, self.most + 1)]
