"""Puts a page together: what was found, then where it can be seen.

All that comes from a history is escaped by the template. The page forbids itself the network, and any script
and style but its own, by a policy that names them by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median

from proof.torture.checker import Verdict, check
from proof.torture.history import Outcome, read_records
from proof.torture.report.facts import Facts, by_kind
from proof.torture.report.moments import choose
from proof.torture.report.overview import (
    NOTICEABLE,
    draw_latency,
    draw_run,
    noticeable,
    percentile,
)
from proof.torture.report.palette import Palette
from proof.torture.report.scale import count, duration, since
from proof.torture.report.staircase import draw_stairs
from proof.torture.report.timeline import draw

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:  # pragma: no cover - reached by a test in a process of its own
    raise ImportError("the report needs one more package: pip install 'fencelock[torture]'") from error

#: So many violations, errors and gaps are listed.
LISTED = 12


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that stands large on the page.

    Attributes:
        number: as it is shown.
        words: what it counts.
        remark: what else is to be said.
        look: a name of the style sheet.
    """

    number: str
    words: str
    remark: str = ""
    look: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of facts.

    Attributes:
        title: what they are about.
        heads: names of the columns; all but the first hold numbers.
        rows: the facts, as they are shown.
        empty: what is said where there are no rows.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str


def write_report(history: Path, page: Path) -> None:
    """Draw a history as one page of HTML that needs no other file.

    Raises:
        HistoryError: the file is no history.
        OSError: it cannot be read, or the page cannot be written.
    """
    with history.open(encoding="utf-8") as lines:
        records = list(read_records(lines))
    verdict = check(records)
    page.write_text(render(Facts(records), verdict), encoding="utf-8")


def render(facts: Facts, verdict: Verdict) -> str:
    """Return the page."""
    palette = Palette(facts.interest) if Palette.fits(len(facts.interest)) else None
    moments = [(f"moment-{number}", one) for number, one in enumerate(choose(facts, verdict), 1)]
    here = files(__package__)
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            style=Markup(style),  # noqa: S704 - our own files
            script=Markup(script),  # noqa: S704
            style_hash=_hash(style),
            script_hash=_hash(script),
            verdict=verdict,
            listed=LISTED,
            interrupted=not facts.rows,
            lasted=duration(facts.ended - facts.began),
            figures=list(_figures(facts, verdict)),
            timelines=[draw(name, moment, facts, palette) for name, moment in moments],
            run=draw_run(facts, moments) if facts.holds else None,
            latency=draw_latency(facts),
            stairs=draw_stairs(facts, palette),
            tables=list(_tables(facts)),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["in_words"] = in_words
    return environment


def in_words(setting: object) -> str:
    """Say what a setting was, which in a history is a value of JSON."""
    match setting:
        case None:
            return "–"
        case bool():
            return "yes" if setting else "no"
        case list():
            return ", ".join(map(in_words, setting)) or "none"
        case _:
            return str(setting)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _figures(facts: Facts, verdict: Verdict) -> Iterator[Figure]:
    """Yield what a reader wants to know first."""
    seconds = verdict.lasted.seconds
    rate = f"{verdict.acquisitions / seconds:,.0f} a second" if seconds else ""
    yield Figure(
        f"{verdict.acquisitions:,}", "acquisitions", f"of {count(verdict.resources, 'resource')}, {rate}"
    )
    yield Figure(f"{verdict.acknowledged:,}", "writes acknowledged", _lost(verdict))
    refused = verdict.outcomes.get(Outcome.REFUSED, 0)
    unguarded = bool(facts.rows) and all(row.fence is None for row in facts.rows)
    yield Figure(
        f"{refused:,}",
        "stale writes refused",
        "this control has no guard" if unguarded else "by the database",
        "refused" if refused else "",
    )
    yield Figure(
        f"{verdict.overlaps:,}", "overlapping holders", f"{verdict.valid_overlaps:,} within the earlier lease"
    )
    total = sum(verdict.faults.values())
    yield Figure(f"{total:,}", "faults", f"of {count(len(verdict.faults), 'kind')}")
    unavailable = verdict.unavailable.ended - verdict.unavailable.began
    yield Figure(duration(unavailable), "without any lock", "at most, while one was wanted")
    latencies = sorted(hold.latency for hold in facts.holds)
    if latencies:
        p99 = duration(percentile(latencies, 0.99))
        yield Figure(duration(median(latencies)), "median acquisition", f"99th percentile {p99}")


def _lost(verdict: Verdict) -> str:
    if not verdict.rows:
        return "nobody looked at the rows at the end"
    return f"{verdict.lost_updates:,} lost"


def _tables(facts: Facts) -> Iterator[Table]:
    yield Table(
        "Faults",
        ("kind", "how many", "in all", "longest"),
        [
            (
                kind,
                f"{len(some):,}",
                duration(sum(one.ended - one.began for one in some)),
                duration(max(one.ended - one.began for one in some)),
            )
            for kind, some in sorted(by_kind(facts.faults).items())
        ],
        "Nothing was broken.",
    )
    yield Table(
        "Longest times without a lock",
        ("from", "for", "broken at that time"),
        [
            (
                since(facts.began, gap.began),
                duration(gap.ended - gap.began),
                _broken_during(facts, gap.began, gap.ended),
            )
            for gap in noticeable(facts.gaps)[:LISTED]
        ],
        f"None of {duration(NOTICEABLE)} or more.",
    )
    yield Table(
        "Writes",
        ("outcome", "how many"),
        _counted(Counter(str(write.outcome) for write in facts.writes)),
        "Nothing was written.",
    )
    yield Table(
        "Errors",
        ("error", "while", "how many"),
        [(name, phase, f"{number:,}") for (name, phase), number in _errors(facts).most_common(LISTED)],
        "There were none.",
    )


def _counted(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, f"{number:,}") for name, number in sorted(counts.items(), key=lambda item: -item[1])]


def _errors(facts: Facts) -> Counter[tuple[str, str]]:
    errors = Counter((one.error, "acquiring") for one in facts.failures)
    errors.update((one.error, "writing") for one in facts.writes if one.error)
    errors.update(
        (one.release.error, "releasing") for one in facts.holds if one.release and one.release.error
    )
    return errors


def _broken_during(facts: Facts, began: int, ended: int) -> str:
    kinds = {one.fault for one in facts.faults if one.began < ended and one.ended > began}
    return ", ".join(sorted(kinds)) or "nothing"
