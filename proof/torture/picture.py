"""One picture of a run: its speed and what was broken, how long locks took, and a stale write refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proof.torture.checker import Verdict, describe
from proof.torture.history import Outcome, Write
from proof.torture.trace import Numbers, write_trace

_NANOSECONDS: Final = 1_000_000_000
_BINS: Final = 200
#: So many leases have room for the names of their workers.
_NAMED: Final = 25
_LEASE, _FAULT, _GAP, _REFUSED, _ACCEPTED = "#4878a8", "#c58b1b", "#f4c7c3", "#c0392b", "#2e7d32"
_STYLE: Final = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def report(history: Path, verdict: Verdict) -> tuple[Path, Path]:
    """Write the trace and the picture of a history beside it, and return where they are."""
    trace, picture = history.with_name("trace.json"), history.with_name("picture.png")
    draw(write_trace(history, trace), verdict, picture)
    return trace, picture


def draw(numbers: Numbers, verdict: Verdict, picture: Path) -> None:
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(13, 10), layout="constrained")
        kinds = len({fault.fault for fault in numbers.faults})
        layout = "RR;FF;LL" if numbers.stale is None else "RR;FF;LS"
        axes = figure.subplot_mosaic(layout, height_ratios=[3, 0.8 + 0.25 * kinds, 4])
        axes["F"].sharex(axes["R"])
        _rate(axes["R"], numbers, verdict)
        _faults(axes["F"], numbers)
        _latency(axes["L"], numbers)
        if numbers.stale is not None:
            _stairs(axes["S"], numbers, numbers.stale)
        lines = [line for line in describe(verdict) if line.startswith(("acquisitions", "RIGHT", "WRONG"))]
        figure.suptitle("\n".join(reversed(lines)), x=0.01, ha="left", fontsize=11)
        figure.savefig(picture, dpi=110)


def _seconds(numbers: Numbers, at: int) -> float:
    return (at - numbers.run.began) / _NANOSECONDS


def _rate(axes: Axes, numbers: Numbers, verdict: Verdict) -> None:
    axes.set_title("Leases; pale red: nobody got one; red marks at the foot: writes that were refused")
    began, ended = (_seconds(numbers, at) for at in (verdict.lasted.began, verdict.lasted.ended))
    completed = (np.asarray(numbers.completed) - numbers.run.began) / _NANOSECONDS
    edges = np.linspace(began, max(ended, began + 1e-9), _BINS + 1)
    axes.stairs(np.histogram(completed, edges)[0] / np.diff(edges), edges, fill=True, color=_LEASE)
    for gap in numbers.unavailable():
        axes.axvspan(_seconds(numbers, gap.began), _seconds(numbers, gap.ended), color=_GAP, zorder=0)
    if refused := [_seconds(numbers, at) for at in numbers.refused]:
        axes.plot(refused, np.zeros(len(refused)), "|", color=_REFUSED, markersize=12, clip_on=False)
    axes.margins(x=0.005)
    axes.tick_params(labelbottom=False)
    axes.set_ylabel("a second")


def _faults(axes: Axes, numbers: Numbers) -> None:
    axes.set_title("What was broken, and how often")
    by_kind = defaultdict(list)
    for fault in numbers.faults:
        by_kind[fault.fault].append(
            (_seconds(numbers, fault.began), (fault.ended - fault.began) / _NANOSECONDS)
        )
    for row, kind in enumerate(sorted(by_kind, reverse=True)):
        # The edge has a width of its own, for many faults are shorter than a pixel.
        axes.broken_barh(by_kind[kind], (row - 0.35, 0.7), color=_FAULT, alpha=0.7, linewidth=0.8)
    labels = [f"{kind} ({len(by_kind[kind])})" for kind in sorted(by_kind, reverse=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("seconds since the begin of the run")


def _latency(axes: Axes, numbers: Numbers) -> None:
    took = (np.asarray(numbers.completed) - np.asarray(numbers.began)) / _NANOSECONDS
    if len(took):
        half, most, longest = (_duration(float(np.quantile(took, share)), 0) for share in (0.5, 0.99, 1.0))
        axes.set_title(f"An acquisition took, waiting included: half {half}, 99 % {most}, longest {longest}")
        edges = np.geomspace(max(took.min(), 1e-5), max(took.max(), 2e-5), 80)
        axes.stairs(np.histogram(took, edges)[0], edges, fill=True, color=_LEASE)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_duration)
    axes.set_ylabel("acquisitions")


def _duration(seconds: float, _position: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _stairs(axes: Axes, numbers: Numbers, stale: Write) -> None:
    axes.set_title(f"Tokens of {stale.resource}: a step is a lease, ✕ a refused write, ● an accepted one")
    holds = sorted(numbers.holds, key=lambda hold: hold.lease.token)
    for rank, hold in enumerate(holds):
        began, ended = _seconds(numbers, hold.lease.completed), _seconds(numbers, hold.worked_until)
        axes.plot([began, ended], [rank, rank], "-|", color=_LEASE, linewidth=5, markersize=11)
        for write in hold.writes:
            mark, colour = ("x", _REFUSED) if write.outcome is Outcome.REFUSED else (".", _ACCEPTED)
            axes.plot(
                _seconds(numbers, write.ended), rank, mark, color=colour, markersize=10, markeredgewidth=2
            )
    for fault in numbers.faults:
        if fault.target == f"worker {stale.worker}":
            times = _seconds(numbers, fault.began), _seconds(numbers, fault.ended)
            axes.axvspan(*times, color=_FAULT, alpha=0.15, zorder=0)
    axes.set_xlim(*(_seconds(numbers, at) for at in numbers.around_stale))
    axes.set_xlabel(f"seconds since the begin of the run; shaded: worker {stale.worker} was paused or killed")
    shown = range(len(holds)) if len(holds) <= _NAMED else range(0)
    axes.set_yticks(shown, [f"worker {holds[rank].lease.worker}" for rank in shown])
    axes.set_ylabel("larger tokens above")
