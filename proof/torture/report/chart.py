"""The few marks that all charts are made of, as values; the template turns them into SVG.

A chart is as wide as its page and as high as its rows: horizontal places are per cent, vertical ones are
pixels. What a mark stands for is in its facts, which a reader gets by pointing at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proof.torture.report.scale import Window

#: Units of a curve's horizontal places across the whole width.
CURVE_WIDTH = 1000
#: Below the rows of a chart, for the names of the ticks.
AXIS = 26
#: How near to an edge (in per cent) a text is set inwards rather than centred.
_EDGE = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted.

    Attributes:
        left: its beginning, in per cent.
        width: its length, in per cent.
        top: its upper edge.
        height: how high it is.
        look: names of the style sheet.
        facts: what a reader gets to know by pointing at it; a line for each.
        link: where a click leads, if anywhere.
    """

    left: float
    width: float
    top: float
    height: float
    look: str
    facts: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Glyph:
    """Something that happened at one moment; `shape` is the name of a symbol of the template."""

    shape: str
    x: float
    y: float
    facts: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """Words in a chart, or beside it."""

    words: str
    y: float
    x: float = 0
    look: str = ""

    @property
    def anchor(self) -> str:
        """How the words lie about their place: inwards at the edges."""
        return "start" if self.x < _EDGE else "end" if self.x > 100 - _EDGE else "middle"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line; its points are in units of `CURVE_WIDTH` and in pixels."""

    look: str
    path: str


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend.

    Attributes:
        sign: the name of a symbol or a swatch of the style sheet.
        words: what it stands for.
        letter: what stands on the bars beside the colour, if anything.
    """

    sign: str
    words: str
    letter: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything that is drawn on one axis of time.

    Attributes:
        name: unique on the page; a word.
        label: what is seen, for those who cannot see it.
        window: the stretch of the run.
        rows: pixels above the axis.
        names: of the rows, or of the other axis; beside the chart.
        rules: heights of horizontal lines.
        shades: bars behind everything.
        curves: lines.
        bars: in front of them.
        glyphs: in front of those.
        texts: in front of everything.
        keys: its legend.
    """

    name: str
    label: str
    window: Window
    rows: float
    names: Sequence[Text] = ()
    rules: Sequence[float] = ()
    shades: Sequence[Bar] = ()
    curves: Sequence[Curve] = ()
    bars: Sequence[Bar] = ()
    glyphs: Sequence[Glyph] = ()
    texts: Sequence[Text] = ()
    keys: Sequence[Key] = ()

    @property
    def height(self) -> float:
        """How high it is, with its axis."""
        return self.rows + AXIS

    @property
    def ticks(self) -> list[Text]:
        """The names on the axis of time."""
        return [Text(words, self.rows + 17, x, "tick") for x, words in self.window.ticks()]

    @property
    def began(self) -> float:
        """The left edge, in seconds of the run; for the script."""
        return (self.window.began - self.window.origin) / 1e9

    @property
    def seconds(self) -> float:
        """The width, in seconds; for the script."""
        return self.window.length / 1e9


def path(points: Iterable[tuple[float, float] | None]) -> str:
    """Write a line through points given in per cent and pixels; None interrupts it."""
    words, verb = [], "M"
    for point in points:
        if point is None:
            verb = "M"
            continue
        words.append(f"{verb}{point[0] * CURVE_WIDTH / 100:.2f} {point[1]:.1f}")
        verb = "L"
    return "".join(words)
