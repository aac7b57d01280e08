"""Tokens as stairs: each lease is a tread, as long as its holder worked, at the height of its token.

On a staircase a stale holder is a tread that goes on below the next one, and a refused write is a cross at
the end of it. Tokens of different epochs are a factor of 2**44 apart, so heights are ranks: the first
token that is seen, the second, and so on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fencelock.tokens import split
from proof.torture.report.chart import Bar, Chart, Curve, Glyph, Text, path
from proof.torture.report.facts import Facts, Hold, Refusal
from proof.torture.report.overview import whole
from proof.torture.report.palette import Palette
from proof.torture.report.scale import Window, count, duration

#: So many resources have stairs; so many leases are told apart on them; and so many steps a whole run has.
RESOURCES, TREADS, MOST_TREADS, STEPS = 4, 16, 120, 400
_HEIGHT, _TOP = 150.0, 10.0
_RUG = 18
#: Pixels from one line of words to the next.
_LINE = 14
#: Crosses nearer to each other than this (in per cent) become one, which tells of so many writes.
_CROSS, _TOLD = 1.0, 5


@dataclass(frozen=True, slots=True)
class Stairs:
    """The tokens of one resource.

    Attributes:
        resource: which.
        charts: the whole run, and its most telling part where the whole has too many steps.
        words: what is on the charts.
    """

    resource: str
    charts: Sequence[Chart]
    words: str


def draw_stairs(facts: Facts, palette: Palette | None) -> list[Stairs]:
    """Draw the tokens of the resources where most was refused, or else locked."""
    return [
        _stairs(f"stairs-{number}", resource, facts, palette or Palette([resource]))
        for number, resource in enumerate(facts.interest[:RESOURCES], 1)
    ]


def _stairs(name: str, resource: str, facts: Facts, palette: Palette) -> Stairs:
    holds = facts.by_resource[resource]
    refusals = [one for one in facts.refusals if one.write.resource == resource]
    look = palette.look(resource)
    words = (
        f"{count(len(holds), 'lease')}, {count(len(refusals), 'refused write')}; "
        f"the first token is {min(hold.token for hold in holds)}"
    )
    if len(holds) <= TREADS:
        return Stairs(resource, [_close(name, holds, refusals, whole(facts), look)], words)
    part = _telling(holds, refusals)
    margin = max((part[-1].ended - part[0].asked) // 20, 1)
    window = Window(facts.began, part[0].asked - margin, max(part[-1].ended, part[-1].began) + margin)
    return Stairs(
        resource,
        [
            _far(f"{name}-run", holds, refusals, whole(facts), look),
            _close(f"{name}-part", part, refusals, window, look),
        ],
        f"{words}; the second chart shows {len(part)} leases",
    )


def _telling(holds: Sequence[Hold], refusals: Iterable[Refusal]) -> Sequence[Hold]:
    """Return neighbouring leases about a refused write: the one with the fewest leases to be told apart."""
    spans = []
    for refusal in refusals:
        if refusal.hold is not None and refusal.successor is not None:
            first = bisect_left(holds, refusal.hold.began, key=_began)
            spans.append((bisect_left(holds, refusal.write.ended, key=_began) - first, first))
    steps, first = min(spans, default=(TREADS // 2, 0))
    first = max(0, min(first - max(0, TREADS - steps) // 2, len(holds) - TREADS))
    return holds[first : first + max(TREADS, min(steps + TREADS // 4, MOST_TREADS))]


def _began(hold: Hold) -> int:
    return hold.began


class _Heights:
    """Where tokens lie: by their rank among those that are shown."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = sorted(set(tokens))
        self._step = _HEIGHT / max(len(self.tokens), 1)

    def of(self, token: int) -> float:
        """Return the height of a token; of one that is not among them, where it would be."""
        return round(_TOP + _HEIGHT - self._step * (bisect_left(self.tokens, token) + 0.5), 2)

    def epochs(self) -> list[tuple[float, int]]:
        """Return where epochs begin, but for the first one and those without room for their names."""
        found: list[tuple[float, int]] = []
        for earlier, later in pairwise(self.tokens):
            y, epoch = round(self.of(later) + self._step / 2, 1), split(later)[0]
            if epoch != split(earlier)[0] and (not found or found[-1][0] - y >= _LINE):
                found.append((y, epoch))
        return found

    def names(self) -> list[Text]:
        """Return what stands beside the stairs."""
        return [
            Text("tokens", _TOP + _HEIGHT / 2 + 4),
            Text("first", _TOP + _HEIGHT, look="scale"),
            Text(f"+{len(self.tokens) - 1:,}", _TOP + 9, look="scale"),
            Text("refused", _TOP + _HEIGHT + _RUG - 2),
        ]


@dataclass(frozen=True, slots=True)
class _Axes:
    """What stairs are drawn on.

    Attributes:
        name: of the chart.
        label: for those who cannot see it.
        window: how wide it is.
        heights: how high tokens lie.
    """

    name: str
    label: str
    window: Window
    heights: _Heights

    def chart(
        self,
        refusals: Iterable[Refusal],
        *,
        curve: Curve,
        bars: Sequence[Bar] = (),
        glyphs: Sequence[Glyph] = (),
    ) -> Chart:
        """Return the stairs with their axes, and refused writes below them."""
        epochs = self.heights.epochs()
        return Chart(
            name=self.name,
            label=self.label,
            window=self.window,
            rows=_TOP + _HEIGHT + _RUG + 4,
            names=self.heights.names(),
            rules=[_TOP + _HEIGHT + 4, *(y for y, _ in epochs)],
            bars=bars,
            curves=[curve],
            glyphs=[*glyphs, *_rug(self.window, refusals)],
            texts=[Text(f"epoch {epoch}", y - 4, 0.5, "remark") for y, epoch in epochs],
        )


def _rug(window: Window, refusals: Iterable[Refusal]) -> Iterator[Glyph]:
    """Yield a cross below the stairs for refused writes, one for all that lie too near to each other."""
    groups: defaultdict[int, list[Refusal]] = defaultdict(list)
    for refusal in refusals:
        if window.overlaps(refusal.write.ended, refusal.write.ended):
            groups[int(window.place(refusal.write.ended) / _CROSS)].append(refusal)
    for some in groups.values():
        facts = "\n".join(_refusal_facts(refusal, window) for refusal in some[:_TOLD])
        if len(some) > _TOLD:
            facts += f"\nand {len(some) - _TOLD:,} more"
        yield Glyph("refused", window.place(some[0].write.ended), _TOP + _HEIGHT + _RUG - 6, facts)


def _refusal_facts(refusal: Refusal, window: Window) -> str:
    write, newer = refusal.write, refusal.successor
    said = f"write refused at {window.time(write.ended)}: token {write.token} of worker {write.worker}"
    return f"{said}, after {newer.token} of worker {newer.worker}" if newer else said


def _far(name: str, holds: Sequence[Hold], refusals: Sequence[Refusal], window: Window, look: str) -> Chart:
    """Draw the stairs of a whole run, of whose steps only so many can be seen."""
    heights = _Heights(hold.token for hold in holds)
    every = -(-len(holds) // STEPS)
    points: list[tuple[float, float] | None] = []
    for first in range(0, len(holds), every):
        some = holds[first : first + every]
        before = points[-1][1] if points and points[-1] else heights.of(some[0].token)
        points.append((window.place(some[0].began), before))
        points += [(window.place(hold.began), heights.of(hold.token)) for hold in _edges(some)]
    points.append((window.place(holds[-1].ended), heights.of(holds[-1].token)))
    label = f"Tokens of {holds[0].resource} over the whole run, with refused writes below"
    return _Axes(name, label, window, heights).chart(refusals, curve=Curve(f"line run {look}", path(points)))


def _edges(holds: Sequence[Hold]) -> list[Hold]:
    """Return the lease with the smallest and that with the largest token, in the order of time."""
    return sorted(
        {id(one): one for one in (min(holds, key=_token), max(holds, key=_token))}.values(), key=_began
    )


def _token(hold: Hold) -> int:
    return hold.token


def _close(name: str, holds: Sequence[Hold], refusals: Sequence[Refusal], window: Window, look: str) -> Chart:
    """Draw each lease as a tread."""
    heights = _Heights(hold.token for hold in holds)
    shown = {id(hold) for hold in holds}
    bars: list[Bar] = []
    glyphs: list[Glyph] = []
    points: list[tuple[float, float] | None] = []
    for hold in holds:
        y = heights.of(hold.token)
        left, width = window.stretch(hold.began, hold.ended)
        bars.append(Bar(left, width, round(y - 1.5, 2), 3, f"tread {look}", _tread_facts(hold, window)))
        points += [(left, points[-1][1] if points and points[-1] else y), (left, y)]
    for refusal in refusals:
        write = refusal.write
        if refusal.hold is not None and id(refusal.hold) in shown:
            facts = _refusal_facts(refusal, window)
            glyphs.append(Glyph("refused", window.place(write.ended), heights.of(write.token), facts))
    label = f"Tokens of {holds[0].resource}, lease by lease, with refused writes below"
    curve = Curve(f"line riser {look}", path(points))
    return _Axes(name, label, window, heights).chart(refusals, curve=curve, bars=bars, glyphs=glyphs)


def _tread_facts(hold: Hold, window: Window) -> str:
    return (
        f"token {hold.token}\nworker {hold.worker}, {duration(hold.ended - hold.began)} from "
        f"{window.time(hold.began)} on"
    )
