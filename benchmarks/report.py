"""What a benchmark has found: tables for the terminal and for Markdown, and the goals beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Spread:
    """The results of the rounds.

    Attributes:
        median: of them.
        low: the smallest.
        high: the largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return what some values come to."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        """Return it in another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.low:,.0f} … {self.high:,.0f}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a plot: whose it is, and what it shows."""

    label: str
    value: Spread


@dataclass(frozen=True, slots=True)
class Section:
    """A table about one case, and what is drawn of it.

    Attributes:
        title: what was done.
        columns: of the table; numbers stand in all but the first.
        rows: the best first.
        note: what the columns mean.
        unit: of the bars; empty where nothing is drawn.
        bars: the best first.
        is_logarithmic: whether their lengths are, for the longest is very much longer than the shortest.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    unit: str = ""
    bars: Sequence[Bar] = ()
    is_logarithmic: bool = False

    def table(self) -> Table:
        """Return it for the terminal."""
        table = Table(title=self.title, caption=self.note)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return it for a document."""
        lines = [f"## {self.title}", ""]
        lines += [f"| {' | '.join(self.columns)} |", "|---" + "|---:" * (len(self.columns) - 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else [])])


@dataclass(frozen=True, slots=True)
class Goal:
    """What is aimed at, and what was measured.

    Attributes:
        what: is measured.
        wanted: as a reader reads it.
        measured: the same.
        holds: whether it is reached.
    """

    what: str
    wanted: str
    measured: str
    holds: bool

    @classmethod
    def at_least(cls, what: str, limit: float, measured: float) -> Goal:
        """Return a goal for a ratio that shall be large."""
        return cls(what, f"≥ {limit:g}", f"{measured:.2f}", measured >= limit)

    @classmethod
    def at_most(cls, what: str, limit: float, measured: float) -> Goal:
        """Return a goal for a ratio that shall be small."""
        return cls(what, f"≤ {limit:g}", f"{measured:.2f}", measured <= limit)


@dataclass(slots=True)
class Report:
    """All of it.

    Attributes:
        title: of the document.
        preamble: how it was measured.
        sections: in the order in which they were measured.
        goals: the same.
        absent: sentences about those who do not take part.
        about: on what it was measured.
        meaning: of the figures, for a reader who chooses.
    """

    title: str
    preamble: str
    sections: list[Section] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    about: str = ""
    meaning: str = ""

    def summary(self) -> Section:
        """Return the goals as a table."""
        return Section(
            "Goals",
            ("what", "wanted", "measured", "reached"),
            [(goal.what, goal.wanted, goal.measured, "yes" if goal.holds else "NO") for goal in self.goals],
        )

    def markdown(self, picture: str) -> str:
        """Return it as a document, in which a picture is shown that lies beside it."""
        parts = [
            f"# {self.title}",
            self.preamble,
            self.about,
            f"![All cases as bars]({picture})",
            self.summary().markdown(),
            *([f"## What it means\n\n{self.meaning}"] if self.meaning else []),
            *(section.markdown() for section in self.sections),
        ]
        if self.absent:
            parts.append("\n".join(["## Absent", "", *(f"- {sentence}" for sentence in self.absent)]))
        return "\n\n".join(parts) + "\n"
