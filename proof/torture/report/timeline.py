"""A moment of a run, lease by lease: a row for each worker, above them what else was broken."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from proof.torture.history import Failure, Fault, Outcome, Write
from proof.torture.report.chart import Bar, Chart, Glyph, Key, Text
from proof.torture.report.facts import Facts, Hold, Overlap, by_kind, worker_name
from proof.torture.report.moments import Moment, window_of
from proof.torture.report.palette import Palette
from proof.torture.report.scale import Window, count, duration

_O = TypeVar("_O", Failure, Write)
_L = TypeVar("_L", Hold, Fault)
#: So many leases are drawn, failed attempts and workers; more would be a carpet.
LEASES, FAILURES, WORKERS = 260, 130, 24
_TOP = 6
_FAULT_ROW = 20
_BAR = 16
_ROOM = 9
#: A bar bears a letter where it is as wide as this, in per cent; a name takes half of it for each of its own.
_LETTER, _NARROW_LETTER = 1.6, 4.6
_GLYPHS = {Outcome.REFUSED: "refused", Outcome.ACKNOWLEDGED: "written", Outcome.UNKNOWN: "doubt"}
_SIGNS = (
    Key("refused", "write refused"),
    Key("written", "write acknowledged"),
    Key("doubt", "outcome unknown"),
    Key("failed", "attempt or write failed"),
    Key("expired", "promised to be alone until here"),
    Key("swatch wait", "waiting for the lock"),
    Key("swatch beyond", "at work beyond the promise"),
    Key("swatch twice", "two holders of a resource"),
    Key("swatch fault", "fault"),
)


@dataclass(frozen=True, slots=True)
class Timeline:
    """A moment, drawn.

    Attributes:
        moment: what is shown, and why.
        chart: how.
        left_out: what is not drawn, as a sentence; empty if everything is.
    """

    moment: Moment
    chart: Chart
    left_out: str


@dataclass(slots=True)
class _Marks:
    """What has been drawn so far."""

    shades: list[Bar] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    glyphs: list[Glyph] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    names: list[Text] = field(default_factory=list)
    rules: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Scene:
    """What is seen of a run in a window."""

    window: Window
    holds: Sequence[Hold]
    failures: Sequence[Failure]
    writes: Sequence[Write]
    overlaps: Sequence[Overlap]
    workers: Sequence[int]
    left_out: str


def draw(name: str, moment: Moment, facts: Facts, palette: Palette | None) -> Timeline:
    """Draw a moment; without a palette for the whole page it gets one of its own."""
    scene = _scene(moment, facts)
    if palette is None:
        palette = Palette.for_few([hold.resource for hold in scene.holds], moment.resources)
    marks = _Marks()
    y = _common_faults(marks, scene.window, facts.common_faults)
    for worker in scene.workers:
        marks.rules.append(y)
        y = _Row(marks, scene, palette, worker, y).draw(facts.faults_of(worker))
    chart = Chart(
        name=name,
        label=f"{moment.title}. A row for each of {len(scene.workers)} workers, {len(scene.holds)} leases.",
        window=scene.window,
        rows=y,
        names=marks.names,
        rules=marks.rules,
        shades=marks.shades,
        bars=marks.bars,
        glyphs=marks.glyphs,
        texts=marks.texts,
        keys=[*palette.keys(), *_signs(marks)],
    )
    return Timeline(moment, chart, scene.left_out)


def _signs(marks: _Marks) -> Iterator[Key]:
    """Yield the entries of the legend for what is really there."""
    seen = {glyph.shape for glyph in marks.glyphs}
    seen |= {f"swatch {look}" for bar in (*marks.bars, *marks.shades) for look in bar.look.split()}
    yield from (key for key in _SIGNS if key.sign in seen)


def _scene(moment: Moment, facts: Facts) -> _Scene:
    window = window_of(moment, facts.began)
    seen = facts.holds_in(window.began, window.ended)
    failed = [one for one in facts.failures if window.overlaps(one.began, one.ended)]
    workers, left_out = _workers(moment, seen, failed)
    nearest = sorted(
        (hold for hold in seen if hold.worker in workers),
        key=lambda hold: (hold.resource not in moment.resources, hold.distance(moment.focus)),
    )
    holds = nearest[:LEASES]
    if len(holds) < len(nearest) and not moment.resources:
        window = _about(holds, window)
    if len(holds) < len(seen):
        left_out = f"{count(len(seen) - len(holds), 'more lease')} of this stretch not drawn{left_out}."
    return _Scene(
        window,
        holds,
        _nearest_failures([one for one in failed if one.worker in workers], moment),
        [one for one in facts.writes_in(window.began, window.ended) if one.worker in workers],
        _overlaps_among(holds, facts),
        sorted(workers),
        left_out,
    )


def _nearest_failures(failed: Iterable[Failure], moment: Moment) -> list[Failure]:
    return sorted(failed, key=lambda failure: abs(failure.ended - moment.focus))[:FAILURES]


def _workers(moment: Moment, holds: Sequence[Hold], failed: Sequence[Failure]) -> tuple[set[int], str]:
    """Choose whose rows are drawn, and say who they are if they are not all.

    All, if there is room; else those whom the moment is about, or a few of the busiest.
    """
    attempts: list[Hold | Failure] = [*holds, *failed]
    everybody = {one.worker for one in attempts}
    if len(holds) <= LEASES and len(everybody) <= WORKERS:
        return everybody, ""
    if moment.resources:
        concerned = (one for one in attempts if one.resource in moment.resources)
        return _busiest(concerned, WORKERS), f": the workers had or wanted {', '.join(moment.resources)}"
    return _busiest(attempts, WORKERS // 2), f": the workers are the busiest of {len(everybody)}"


def _busiest(attempts: Iterable[Hold | Failure], most: int) -> set[int]:
    return {worker for worker, _ in Counter(one.worker for one in attempts).most_common(most)}


def _about(holds: Sequence[Hold], window: Window) -> Window:
    """Narrow a window to what is drawn in it."""
    began = max(window.began, min(hold.began for hold in holds))
    return Window(window.origin, began, max(began + 1, min(window.ended, max(hold.ended for hold in holds))))


def _overlaps_among(holds: Iterable[Hold], facts: Facts) -> list[Overlap]:
    drawn = {id(hold) for hold in holds}
    return [one for one in facts.overlaps if id(one.earlier) in drawn and id(one.later) in drawn]


def _common_faults(marks: _Marks, window: Window, faults: Iterable[Fault]) -> float:
    """Draw rows for each kind of what hit nodes, network or database here; return where they end."""
    y: float = _TOP
    seen = (fault for fault in faults if window.overlaps(fault.began, fault.ended))
    for kind, some in by_kind(seen).items():
        marks.names.append(Text(kind, y + 12))
        for level in _levels(_together(some)):
            for fault in level:
                _draw_common_fault(marks, window, fault, y)
            y += _FAULT_ROW
    return y + 2


def _draw_common_fault(marks: _Marks, window: Window, fault: Fault, y: float) -> None:
    left, width = window.stretch(fault.began, fault.ended)
    marks.bars.append(Bar(left, width, y, _FAULT_ROW - 4, "fault", fault_facts(fault, window)))
    if width > _LETTER * len(fault.target) / 2:
        look = f"on-fault{_if_wide(width, len(fault.target) / 2)}"
        marks.texts.append(Text(fault.target, y + 12, left + width / 2, look))


def _if_wide(width: float, letters: float) -> str:
    """Return the look of what has room on a bar even where a whole page is narrow."""
    return " wide" if width > _NARROW_LETTER * letters else ""


def fault_facts(fault: Fault, window: Window) -> str:
    """Say what was broken, for how long, and since when."""
    lines = [
        f"{fault.fault} of {fault.target}",
        f"{duration(fault.ended - fault.began)}, from {window.time(fault.began)} on",
    ]
    return "\n".join([*lines, fault.detail] if fault.detail else lines)


def _together(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Make one of those that hit several targets at the same time."""
    by_time: defaultdict[int, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_time[fault.began].append(fault)
    for some in by_time.values():
        targets = ", ".join(sorted(fault.target for fault in some))
        yield replace(some[0], target=targets, ended=max(fault.ended for fault in some))


@dataclass(frozen=True, slots=True)
class _Row:
    """The row of one worker: its pauses, its leases, what became of its writes.

    Leases that it has at one time lie below each other.
    """

    marks: _Marks
    scene: _Scene
    palette: Palette
    worker: int
    top: float

    def draw(self, faults: Iterable[Fault]) -> float:
        """Draw everything; return where the row ends."""
        levels = _levels([hold for hold in self.scene.holds if hold.worker == self.worker])
        height = _BAR * max(1, len(levels)) + _ROOM
        self._draw_faults(faults, height)
        name = worker_name(self.worker)
        self.marks.names.append(Text(name, self.top + height / 2 + 4))
        for failure in self._own(self.scene.failures):
            self._draw_failure(failure)
        y_of: dict[tuple[str, int], float] = {}
        for level, holds in enumerate(levels):
            y = self.top + _ROOM / 2 + _BAR * level
            free_from = 0
            for hold in holds:
                y_of[hold.resource, hold.token] = y
                self._draw_hold(hold, y, free_from)
                free_from = hold.ended
        for write in self._own(self.scene.writes):
            at = y_of.get((write.resource, write.token))
            if at is not None:
                self._draw_write(write, at)
        return self.top + height

    def _own(self, some: Iterable[_O]) -> Iterator[_O]:
        return (one for one in some if one.worker == self.worker)

    def _draw_faults(self, faults: Iterable[Fault], height: float) -> None:
        window = self.scene.window
        for fault in faults:
            if window.overlaps(fault.began, fault.ended):
                left, width = window.stretch(fault.began, fault.ended)
                facts = fault_facts(fault, window)
                self.marks.shades.append(Bar(left, width, self.top + 1, height - 1, "fault", facts))

    def _bar(self, began: int, ended: int, where: tuple[float, float], look: str, facts: str = "") -> None:
        """Draw something that lasted; `where` is its upper edge and its height."""
        if self.scene.window.overlaps(began, ended):
            left, width = self.scene.window.stretch(began, ended)
            self.marks.bars.append(Bar(left, width, *where, look, facts))

    def _draw_hold(self, hold: Hold, y: float, free_from: int) -> None:
        """Draw a lease, and the wait for it where its level was free: tasks of a worker wait together."""
        facts, window = self._hold_facts(hold), self.scene.window
        valid_until = min(max(hold.acquisition.valid_until, hold.began), hold.ended)
        self._bar(max(hold.asked, free_from), hold.began, (y + _BAR / 2 - 1.5, 2), "wait", facts)
        look = self.palette.look(hold.resource)
        self._bar(hold.began, valid_until, (y, _BAR - 3), f"hold {look}", facts)
        if valid_until < hold.ended:
            self._bar(valid_until, hold.ended, (y, _BAR - 3), f"beyond {look}", facts)
            if window.overlaps(valid_until, valid_until):
                self.marks.glyphs.append(Glyph("expired", window.place(valid_until), y, facts))
        left, width = window.stretch(hold.began, valid_until)
        if hold.began < window.ended and valid_until > window.began and width > _LETTER:
            letter = self.palette.letter(hold.resource)
            if letter:
                look = f"letter {look}{_if_wide(width, 1)}"
                self.marks.texts.append(Text(letter, y + 10.5, left + width / 2, look))
        for overlap in self.scene.overlaps:
            if hold is overlap.earlier or hold is overlap.later:
                self._bar(overlap.began, overlap.ended, (y + _BAR - 3, 3), "twice")

    def _hold_facts(self, hold: Hold) -> str:
        window = self.scene.window
        lines = [
            f"{hold.resource}, token {hold.token}",
            f"worker {hold.worker}, {duration(hold.ended - hold.began)} from {window.time(hold.began)} on",
            f"it took {duration(hold.latency)} to get",
        ]
        if hold.release is None:
            lines.append("never released: its process ended, or the run did")
        elif hold.release.error:
            lines.append(f"its release said {hold.release.error}")
        if hold.ended > hold.acquisition.valid_until:
            beyond = duration(hold.ended - hold.acquisition.valid_until)
            lines.append(f"at work for {beyond} beyond the first promise to be alone")
        return "\n".join(lines)

    def _draw_failure(self, failure: Failure) -> None:
        facts = f"{failure.error} for {failure.resource}, after {duration(failure.ended - failure.began)}"
        if failure.message:
            facts += f"\n{failure.message}"
        y = self.top + _ROOM / 2 + _BAR / 2 - 1.5
        self._bar(failure.began, failure.ended, (y, 2), "wait", facts)
        if self.scene.window.overlaps(failure.ended, failure.ended):
            self.marks.glyphs.append(Glyph("failed", self.scene.window.place(failure.ended), y + 1, facts))

    def _draw_write(self, write: Write, y: float) -> None:
        shape = _GLYPHS.get(write.outcome, "failed")
        facts = (
            f"write {write.outcome}: {write.resource}, token {write.token}\n"
            f"worker {write.worker}, at {self.scene.window.time(write.ended)}"
        )
        if write.error:
            facts += f", {write.error}"
        self.marks.glyphs.append(Glyph(shape, self.scene.window.place(write.ended), y + 6.5, facts))


def _levels(lasting: Iterable[_L]) -> list[list[_L]]:
    """Put what lasted at the same time onto different levels."""
    levels: list[list[_L]] = []
    for one in sorted(lasting, key=attrgetter("began")):
        level = next((level for level in levels if level[-1].ended <= one.began), None)
        if level is None:
            levels.append([one])
        else:
            level.append(one)
    return levels
