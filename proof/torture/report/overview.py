"""The whole run in bins of time: how much went on, what was broken, how long an acquisition took."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proof.torture.checker import Gap
from proof.torture.history import Fault
from proof.torture.report.chart import Bar, Chart, Curve, Key, Text, path
from proof.torture.report.facts import Facts, by_kind
from proof.torture.report.moments import Moment
from proof.torture.report.scale import SECOND, LogScale, Window, count, duration
from proof.torture.report.timeline import fault_facts

#: Bins across a chart, at most and at least, and how many leases each should have.
BINS, FEWEST_BINS, PER_BIN = 200, 40, 30
#: A time without any acquisition that is shorter than this is not marked.
NOTICEABLE = SECOND // 4
#: So many bars in one row say no more than a strip; and so many workers have a row.
FAULTS, WORKERS = 250, 32
_LEVELS = 5
_RATE, _LATENCY, _STRIP, _WORKER_ROW = 72, 220, 18, 9
#: Width of the flag of a moment, in per cent.
_FLAG = 2.2


@dataclass(frozen=True, slots=True)
class _Bins:
    """Equal parts of a window; few where there is little to be counted, so that each has some of it."""

    window: Window
    number: int

    @classmethod
    def of_run(cls, facts: Facts) -> _Bins:
        """Divide a whole run."""
        return cls(whole(facts), min(max(len(facts.holds) // PER_BIN, FEWEST_BINS), BINS))

    def of(self, moment: int) -> int:
        """Return which bin a moment is in."""
        number = (moment - self.window.began) * self.number // self.window.length
        return min(max(number, 0), self.number - 1)

    @property
    def seconds(self) -> float:
        """How long a bin is."""
        return self.window.length / self.number / SECOND

    def left(self, number: int) -> float:
        """Return the left edge of a bin, in per cent."""
        return round(100 * number / self.number, 3)


def whole(facts: Facts) -> Window:
    """Return the window of a whole run."""
    return Window(facts.began, facts.began, max(facts.ended, facts.began + 1))


@dataclass(slots=True)
class _Rows:
    """Rows of a chart, from top to bottom.

    Attributes:
        window: of the chart.
        bins: of the window.
        y: where the next row begins.
    """

    window: Window
    bins: _Bins
    y: float = 4
    bars: list[Bar] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    names: list[Text] = field(default_factory=list)
    rules: list[float] = field(default_factory=list)

    def name(self, words: str, height: float) -> None:
        """Name the row that begins here."""
        self.names.append(Text(words, self.y + height / 2 + 4))

    def end(self, height: float) -> None:
        """End the row that begins here, with a line below it."""
        self.y += height
        self.rules.append(self.y)

    def strip(self, began: int, ended: int, look: str, facts: str) -> None:
        """Draw something that lasted, in the row that begins here."""
        if self.window.overlaps(began, ended):
            left, width = self.window.stretch(began, ended)
            self.bars.append(Bar(left, width, self.y + 3, _STRIP - 6, look, facts))

    def columns(self, numbers: Sequence[int], height: float, look: str, facts: Callable[[int], str]) -> None:
        """Draw a column for each bin in the row that begins here, the largest one as high as the row."""
        most, width = max(*numbers, 1), round(100 / self.bins.number, 3)
        for number, quantity in enumerate(numbers):
            if quantity:
                high = round(max(height * quantity / most, 1), 1)
                top = self.y + height - high
                self.bars.append(Bar(self.bins.left(number), width, top, high, look, facts(number)))


def draw_run(facts: Facts, moments: Sequence[tuple[str, Moment]]) -> Chart:
    """Draw what went on in a run; `moments` are what is shown in full elsewhere, and under which names."""
    bins = _Bins.of_run(facts)
    window = bins.window
    rows = _Rows(window, bins)
    _draw_moments(rows, moments)
    _draw_rate(rows, facts)
    _draw_refusals(rows, facts)
    _draw_faults(rows, facts)
    _draw_workers(rows, facts)
    return Chart(
        name="run",
        label="The whole run: leases per second, refused writes, faults by kind, and who held locks when.",
        window=window,
        rows=rows.y,
        names=rows.names,
        rules=rows.rules,
        bars=rows.bars,
        texts=rows.texts,
    )


def _draw_moments(rows: _Rows, moments: Sequence[tuple[str, Moment]]) -> None:
    """Draw a numbered flag for each moment that is shown in full, one below the other where they are near."""
    if len(moments) < 2:
        return
    occupied: list[float] = []  # how far, on each level
    for number, (name, moment) in enumerate(moments, 1):
        left = min(max(rows.window.place(moment.focus), 0), 100 - _FLAG)
        level = next((n for n, until in enumerate(occupied) if until <= left), len(occupied))
        occupied[level : level + 1] = [left + _FLAG]
        y = rows.y + _STRIP * level
        rows.bars.append(Bar(left, _FLAG, y, _STRIP - 3, "flag", f"{number}. {moment.title}", name))
        rows.texts.append(Text(f"{number}", y + 11.5, left + _FLAG / 2, "on-flag"))
    rows.name("in full", _STRIP * len(occupied))
    rows.end(_STRIP * len(occupied) + 4)


def _draw_rate(rows: _Rows, facts: Facts) -> None:
    numbers = _count(rows.bins, (hold.began for hold in facts.holds))
    seconds = rows.bins.seconds
    rows.columns(
        numbers,
        _RATE,
        "rate",
        lambda number: f"{numbers[number] / seconds:,.1f} acquisitions/s{_from(rows, number)}",
    )
    rows.names.append(Text("leases/s", rows.y + _RATE / 2 + 4))
    rows.names.append(Text(f"{max(numbers) / seconds:,.0f}", rows.y + 9, look="scale"))
    rows.end(_RATE)


def _draw_refusals(rows: _Rows, facts: Facts) -> None:
    if not facts.refusals:
        return
    rows.y += 6
    numbers = _count(rows.bins, (refusal.write.ended for refusal in facts.refusals))
    rows.columns(
        numbers,
        _STRIP,
        "refused-column",
        lambda number: f"{count(numbers[number], 'refused write')}{_from(rows, number)}",
    )
    rows.name("refused", _STRIP)
    rows.end(_STRIP)


def _from(rows: _Rows, number: int) -> str:
    began = number * rows.bins.seconds
    return f"\nfrom {began:.1f} s to {began + rows.bins.seconds:.1f} s"


def _count(bins: _Bins, moments: Iterable[int]) -> list[int]:
    numbers = [0] * bins.number
    for moment in moments:
        numbers[bins.of(moment)] += 1
    return numbers


def _draw_faults(rows: _Rows, facts: Facts) -> None:
    """Draw a row for each kind of fault, and one for what nobody could do meanwhile."""
    for kind, faults in sorted(by_kind(facts.faults).items()):
        for fault in thinned(faults):
            rows.strip(fault.began, fault.ended, "fault", fault_facts(fault, rows.window))
        rows.name(kind, _STRIP)
        rows.end(_STRIP)
    gaps = noticeable(facts.gaps)
    for gap in gaps:
        rows.strip(gap.began, gap.ended, "gap", gap_facts(gap, rows.window))
    if gaps:
        rows.name("no lock", _STRIP)
        rows.end(_STRIP)


def thinned(faults: Sequence[Fault]) -> Sequence[Fault]:
    """Return so many faults as a row can show, the longest ones."""
    return sorted(faults, key=lambda fault: fault.ended - fault.began, reverse=True)[:FAULTS]


def noticeable(gaps: Iterable[Gap]) -> list[Gap]:
    """Return the times without a lock that are long enough to be seen."""
    return [gap for gap in gaps if gap.seconds >= NOTICEABLE / SECOND][:FAULTS]


def gap_facts(gap: Gap, window: Window) -> str:
    """Say for how long nobody got a lock, and since when."""
    return f"nobody got a lock for {duration(gap.ended - gap.began)}, from {window.time(gap.began)} on"


def _draw_workers(rows: _Rows, facts: Facts) -> None:
    """Draw how much of each bin every worker held a lock: the fuller, the darker."""
    rows.y += 6
    shares = _shares(rows.bins, facts)
    shown = [worker for worker in facts.workers if worker in shares][:WORKERS]
    for number, worker in enumerate(shown):
        y = rows.y + _WORKER_ROW * number
        for first, last, level in _runs(shares[worker]):
            look = f"busy busy-{level}"
            left, right = rows.bins.left(first), rows.bins.left(last)
            rows.bars.append(Bar(left, round(right - left, 3), y, _WORKER_ROW - 1, look))
    height = _WORKER_ROW * len(shown)
    if shown:
        rows.name(count(len(shown), "worker"), height)
        if len(shown) < len(shares):
            rows.names.append(Text(f"of {len(shares)}", rows.y + height / 2 + 19, look="scale"))
        rows.end(height)


def _shares(bins: _Bins, facts: Facts) -> dict[int, list[int]]:
    """Return for each worker and bin which of `_LEVELS` levels its time under a lease comes to."""
    times: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * bins.number)
    length = bins.window.length / bins.number
    for hold in facts.holds:
        first, last = bins.of(hold.began), bins.of(hold.ended)
        row = times[hold.worker]
        if first == last:
            row[first] += hold.ended - hold.began
            continue
        row[first] += bins.window.began + (first + 1) * length - hold.began
        row[last] += hold.ended - (bins.window.began + last * length)
        for between in range(first + 1, last):
            row[between] += length
    return {worker: [_level(time / length) for time in row] for worker, row in times.items()}


def _level(share: float) -> int:
    """Return 0 for nothing, and `_LEVELS` for all of the time or more."""
    return min(_LEVELS, int(share * _LEVELS) + (share > 0)) if share > 0 else 0


def _runs(levels: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield stretches of one level that is not 0, as (first, end, level)."""
    first = 0
    for number in range(1, len(levels) + 1):
        if number == len(levels) or levels[number] != levels[first]:
            if levels[first]:
                yield first, number, levels[first]
            first = number


def draw_latency(facts: Facts) -> Chart | None:
    """Draw how long acquisitions took, over the run; None where there were none."""
    if not facts.holds:
        return None
    bins = _Bins.of_run(facts)
    window = bins.window
    taken = _taken(bins, facts)
    everything = [one for some in taken for one in some]
    scale = LogScale.around(min(everything), max(everything), top=12, height=_LATENCY)
    lines = [
        (look, [percentile(some, share) if some else None for some in taken])
        for look, share in (("longest", 1.0), ("p99", 0.99), ("p50", 0.5))
    ]
    rows = scale.top + _LATENCY
    return Chart(
        name="latency",
        label="How long acquisitions took over the run: median, 99th percentile and longest, on a log scale.",
        window=window,
        rows=rows,
        names=[
            Text(duration(power).replace(".00", "").replace(".0", ""), y + 4) for y, power in scale.ticks()
        ],
        rules=[y for y, _ in scale.ticks()],
        shades=[*_shades(facts, window, rows)],
        curves=[Curve(f"line {look}", _line(bins, scale, values)) for look, values in lines],
        bars=[*_facts_of_bins(bins, lines, rows)],
        keys=[
            Key("stroke p50", "median"),
            Key("stroke p99", "99th percentile"),
            Key("stroke longest", "longest"),
            Key("swatch fault", "fault of nodes, network or database"),
            Key("swatch gap", f"nobody got a lock for {duration(NOTICEABLE)} or more"),
        ],
    )


def _taken(bins: _Bins, facts: Facts) -> list[list[int]]:
    """Return for each bin how long its acquisitions took, in order."""
    taken: list[list[int]] = [[] for _ in range(bins.number)]
    for hold in facts.holds:
        taken[bins.of(hold.began)].append(hold.latency)
    for some in taken:
        some.sort()
    return taken


def percentile(ordered: Sequence[int], share: float) -> int:
    """Return the smallest of the numbers that `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _line(bins: _Bins, scale: LogScale, values: Sequence[int | None]) -> str:
    """Write a line with a tread for each bin, interrupted where there is nothing."""
    points: list[tuple[float, float] | None] = []
    for number, value in enumerate(values):
        if value is None:
            points.append(None)
        else:
            y = scale.place(value)
            points += [(bins.left(number), y), (bins.left(number + 1), y)]
    return path(points)


def _shades(facts: Facts, window: Window, height: float) -> Iterator[Bar]:
    for fault in thinned(facts.common_faults):
        left, width = window.stretch(fault.began, fault.ended)
        yield Bar(left, width, 12, height - 12, "fault shade", fault_facts(fault, window))
    for gap in noticeable(facts.gaps):
        left, width = window.stretch(gap.began, gap.ended)
        yield Bar(left, width, 0, 9, "gap", gap_facts(gap, window))


def _facts_of_bins(
    bins: _Bins, lines: Sequence[tuple[str, Sequence[int | None]]], height: float
) -> Iterator[Bar]:
    """Yield invisible bars that say what the lines say."""
    names = ("longest", "99th percentile", "median")
    for number in range(bins.number):
        values = [values[number] for _, values in lines]
        said = [f"{name} {duration(one)}" for name, one in zip(names, values, strict=True) if one is not None]
        if said:
            began = number * bins.seconds
            said.append(f"from {began:.1f} s to {began + bins.seconds:.1f} s")
            yield Bar(bins.left(number), 100 / bins.number, 12, height - 12, "unseen", "\n".join(said))
