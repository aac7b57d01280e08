"""The picture of a report: a panel of bars for each case, as SVG."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import FENCELOCK
from benchmarks.report import Section

_OURS, _OTHERS = "#c44e52", "#8c9bb0"
_COLUMNS = 2
_BAR_HEIGHT, _PANEL_HEAD, _PANEL_WIDTH = 0.24, 0.9, 6.5


def draw(sections: Sequence[Section], about: str, path: Path) -> None:
    """Draw those of the sections that have bars.

    The bars are medians, with lines from the slowest to the fastest round.
    """
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    # Text stays text, and the same results make the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fencelock", "font.size": 8})
    drawn = [section for section in sections if section.bars]
    rows = math.ceil(len(drawn) / _COLUMNS)
    heights = [
        _PANEL_HEAD
        + _BAR_HEIGHT * max(len(section.bars) for section in drawn[row * _COLUMNS : (row + 1) * _COLUMNS])
        for row in range(rows)
    ]
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(
        rows,
        _COLUMNS,
        figsize=(_COLUMNS * _PANEL_WIDTH, sum(heights) + 0.5),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
        squeeze=False,
    )
    panels = list(axes.flat)
    for number, (section, panel) in enumerate(zip(drawn, panels, strict=False)):
        neighbours = drawn[number - number % _COLUMNS :][:_COLUMNS]
        _fill(panel, section, most=max(len(one.bars) for one in neighbours))
    for panel in panels[len(drawn) :]:
        panel.axis("off")
    figure.supxlabel(f"{about}", fontsize=7)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _fill(panel: Any, section: Section, *, most: int) -> None:
    """Draw a panel beside another that has `most` bars: those of both are equally thick."""
    bars = list(reversed(section.bars))  # the best on top
    medians = [bar.value.median for bar in bars]
    spread = [
        [bar.value.median - bar.value.low for bar in bars],
        [bar.value.high - bar.value.median for bar in bars],
    ]
    colours = [_OURS if bar.label.startswith(FENCELOCK) else _OTHERS for bar in bars]
    panel.barh([bar.label for bar in bars], medians, xerr=spread, color=colours, ecolor="#444", capsize=2)
    for number, bar in enumerate(bars):
        panel.annotate(
            _short(bar.value.median),
            (bar.value.high, number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    panel.margins(x=0.12)
    panel.set_ylim(len(bars) - 0.4 - most, len(bars) - 0.4)
    if section.is_logarithmic:
        panel.set_xscale("log")
    else:
        panel.set_xlim(left=0)
    panel.set_title(section.title, loc="left", fontsize=9)
    panel.set_xlabel(section.unit)
    panel.spines[["top", "right"]].set_visible(False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
