"""The page that a run is drawn as: what is on it, and that nothing from a history can break it.

How it looks in a browser is pinned in `test_report_in_browser.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fencelock.tokens import compose
from proof.torture.checker import check
from proof.torture.history import (
    VERSION,
    WORKER_KILL,
    Acquisition,
    Cut,
    Failure,
    Fault,
    HistoryError,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Write,
)
from proof.torture.report import write_report
from proof.torture.report.facts import Facts
from proof.torture.report.moments import MOMENTS, choose
from proof.torture.report.scale import MILLISECOND, SECOND, LogScale, Window, duration
from tests.torture.facts import RUN, acquisition, release, row, save, write
from tests.torture.made_up import BEGAN, MadeUp

VOID = {"meta", "link", "br"}
MEGABYTE = 1_000_000


class Page(HTMLParser):
    """A page, taken apart; it complains about elements that are not closed in order.

    Attributes:
        elements: every element with its attributes.
        words: all text that is no style and no script.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        """Check that it is the one that was opened last."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note what is read."""
        if not self._open or self._open[-1] not in {"style", "script"}:
            self.words += data

    def all(self, tag: str, look: str = "") -> list[dict[str, str]]:
        """Return the attributes of the elements of a kind, of one class if it is given."""
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and (not look or look in attrs.get("class", "").split())
        ]


def drawn(folder: Path, records: Iterable[Record]) -> Page:
    """Write the report of a history, and take it apart."""
    history, page = save(folder / "history.jsonl", records), folder / "report.html"
    write_report(history, page)
    return Page(page.read_text(encoding="utf-8"))


def test_a_page_shows_verdict_charts_and_counts(tmp_path: Path) -> None:
    """What was found comes first, as a sentence; then what happened, in charts and in tables."""
    records = MadeUp().records()
    page = drawn(tmp_path, records)
    refused = [one for one in records if isinstance(one, Write) and one.outcome is Outcome.REFUSED]
    assert "Every promise was kept" in page.words
    for heading in ("The whole run", "Moments in full", "Tokens", "How long an acquisition took", "Counts"):
        assert heading in page.words
    assert refused
    assert f"stale writes refused{len(refused)} by the database" in page.words
    assert page.all("rect", "hold")
    assert page.all("use", "refused")
    assert page.all("use", "expired")
    assert page.all("rect", "twice")
    assert page.all("path", "p99")
    assert len(page.all("h1")) == 1


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """Every reference is to a place on the page, and its policy forbids all others."""
    page = drawn(tmp_path, MadeUp().records())
    references = [attrs[name] for _, attrs in page.elements for name in ("href", "src") if name in attrs]
    assert references
    assert {reference[0] for reference in references if reference != "data:,"} == {"#"}
    targets = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
    assert {reference[1:] for reference in references if reference.startswith("#")} <= targets
    (policy,) = (one["content"] for one in page.all("meta") if "http-equiv" in one)
    assert policy.startswith("default-src 'none'")
    assert not [attrs for _, attrs in page.elements if "style" in attrs], "the policy would drop it"


HOSTILE = "<script>alert('ü')</script>\"'&\u202e🔒"


def test_nothing_from_a_history_becomes_markup(tmp_path: Path) -> None:
    """Names, errors, messages, settings and servers are shown as they are, whatever they contain."""
    records: list[Record] = [
        Run(VERSION, HOSTILE, HOSTILE, 0, {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE}),
        Acquisition(0, HOSTILE, 10, 20, 1, 50),
        Release(0, HOSTILE, 1, 80, 90, HOSTILE),
        Acquisition(1, HOSTILE, 10, 60, 2, 200),
        Release(1, HOSTILE, 2, 70, 75),
        Write(0, HOSTILE, 1, 76, 78, Outcome.REFUSED, 0, HOSTILE),
        Failure(1, HOSTILE, 80, 90, HOSTILE, HOSTILE),
        Fault(HOSTILE, HOSTILE, 30, 70, HOSTILE),
        Row(HOSTILE, 0, 2),
    ]
    plain, hostile = drawn(tmp_path, MadeUp(seconds=2).records()), drawn(tmp_path, records)
    assert hostile.words.count(HOSTILE) > 8
    assert len(hostile.all("script")) == len(plain.all("script")) == 1
    assert {name for _, attrs in hostile.elements for name in attrs} <= {
        *(name for _, attrs in plain.elements for name in attrs)
    }


def test_without_its_package_the_report_says_what_to_install() -> None:
    """Who has only the locks installed gets a sentence."""
    script = "import sys; sys.modules['jinja2'] = None; import proof.torture.report"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pip install 'fencelock[torture]'" in ended.stderr


def test_settings_are_in_words(tmp_path: Path) -> None:
    """Neither JSON nor Python is what a reader speaks."""
    settings = {"guard": True, "quorum": False, "seed": None, "nodes": [], "faults": ["clock", "node-blank"]}
    page = drawn(tmp_path, [Run(VERSION, "0", "today", 0, settings)])
    words = page.words[page.words.index("Settings and servers") :].split("\n")
    assert {"guardyes", "quorumno", "seed–", "nodesnone", "faultsclock, node-blank"} <= set(words)


def test_a_run_in_which_nothing_happened_has_a_page(tmp_path: Path) -> None:
    """No charts, but the verdict, and that there was nothing."""
    page = drawn(tmp_path, [RUN])
    assert "0 acquisitions" in page.words
    assert "Nothing was written." in page.words
    assert not page.all("rect", "hold")


def test_what_is_no_history_gets_no_page(tmp_path: Path) -> None:
    """A file without a run, or with a line of something else, is refused as the checker refuses it."""
    history, page = tmp_path / "history.jsonl", tmp_path / "report.html"
    for text in ("", "no history\n{}\n"):
        history.write_text(text)
        with pytest.raises(HistoryError):
            write_report(history, page)
    assert not page.exists()


def test_a_run_without_writes_has_a_page(tmp_path: Path) -> None:
    """Locks alone can be tortured, too."""
    page = drawn(tmp_path, MadeUp(writes=0, pauses=0).records())
    assert page.all("rect", "hold")
    assert not page.all("use", "refused")
    assert "Nothing was written." in page.words


def test_one_worker_with_one_lease_has_a_page(tmp_path: Path) -> None:
    """The smallest run with something in it: a bar, a step, an acquisition that took a millisecond."""
    records: list[Record] = [RUN, acquisition(1, 0, MILLISECOND), release(1, SECOND)]
    records += [write(1, 1, 2, 0), row(1, 1)]
    page = drawn(tmp_path, records)
    assert len(page.all("rect", "hold")) == 1
    assert len(page.all("rect", "tread")) == 1
    assert page.all("path", "p50")


def test_a_run_that_was_interrupted_says_so(tmp_path: Path) -> None:
    """Without rows at its end, with a line cut and leases that were never released."""
    records = [one for one in MadeUp().records() if not isinstance(one, Row | Release)]
    page = drawn(tmp_path, [*records, Cut('{"kind":"wri')])
    assert "The run was interrupted" in page.words
    assert "1 line was left unfinished" in page.words
    assert "never released" in page.words


def test_violations_are_what_a_reader_sees_first(tmp_path: Path) -> None:
    """Each with its sentence, and with the moment at which it happened; many are counted, not listed."""
    twice = [
        record
        for number in range(1, 400)
        for record in (
            acquisition(number // 2 + 1, number * SECOND, number * SECOND + 1),
            release(number // 2 + 1, number * SECOND + SECOND // 2),
        )
    ]
    page = drawn(tmp_path, [RUN, *twice])
    assert "398 violations" in page.words
    assert "Every promise was kept" not in page.words
    assert "token 2 was given twice" in page.words
    assert "and 386 more" in page.words
    assert "Violation: P1" in page.words
    assert "these promises were broken: P1 (199), P2 (199)." in page.words
    assert "no token twice" not in page.words


def test_a_control_says_that_it_has_no_guard(tmp_path: Path) -> None:
    """Its rows have no fence; nobody should take 0 refused writes for a good sign."""
    page = drawn(tmp_path, [RUN, acquisition(1, 0, 1), release(1, SECOND), row(0, None)])
    assert "this control has no guard" in page.words


def test_what_is_drawn_agrees_with_the_checker() -> None:
    """The report joins leases and releases by itself; overlaps and the longest wait are the checker's."""
    records = MadeUp(seed=3, pauses=9).records()
    records.append(Fault(WORKER_KILL, "worker 1", records[-10].began, records[-10].began))  # type: ignore[union-attr]
    facts, verdict = Facts(records), check(records)
    assert len(facts.overlaps) == verdict.overlaps > 0
    assert facts.gaps[0] == verdict.unavailable
    assert len(facts.holds) == verdict.acquisitions
    assert len(facts.refusals) == verdict.outcomes[Outcome.REFUSED] > 0


def test_moments_show_each_sort_of_what_happened() -> None:
    """Refused writes, overlaps, the longest wait, each kind of fault; no more than a reader can look at."""
    facts = Facts(records := MadeUp(seed=5, pauses=12, seconds=60).records())
    moments = choose(facts, check(records))
    titles = " ".join(moment.title for moment in moments)
    assert len(moments) <= MOMENTS
    for words in ("stale write", "Nobody got a lock", "node-blank", "partition"):
        assert words in titles
    assert [moment.focus for moment in moments] == sorted(moment.focus for moment in moments)


def test_a_new_epoch_is_named_on_the_stairs(tmp_path: Path) -> None:
    """Tokens of two epochs differ by 2**44, and are one step apart on the page."""
    tokens = [compose(0, 7), compose(0, 8), compose(1, 1)]
    leases = [acquisition(token, time * SECOND, time * SECOND + 9) for time, token in enumerate(tokens)]
    page = drawn(tmp_path, [RUN, *leases, *(release(token, 3 * SECOND) for token in tokens)])
    heights = sorted(float(bar["y"]) for bar in page.all("rect", "tread"))
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], abs=0.1)
    assert "epoch 1" in page.words


def test_tasks_that_wait_do_not_push_leases_apart(tmp_path: Path) -> None:
    """Twenty tasks of one worker that wait for one resource take turns at one level."""
    leases = [acquisition(token, 0, token * SECOND) for token in range(1, 21)]
    ends = [release(token, token * SECOND + SECOND // 2) for token in range(1, 21)]
    page = drawn(tmp_path, [RUN, *leases, *ends])
    assert len({bar["y"] for bar in page.all("rect", "hold")}) == 1
    assert len(page.all("rect", "wait")) == 20


def test_leases_that_a_worker_has_at_one_time_lie_below_each_other(tmp_path: Path) -> None:
    """Otherwise one would hide the other."""
    leases = [acquisition(1, 0, SECOND, resource=name) for name in "ab"]
    ends = [Release(0, name, 1, 3 * SECOND, 3 * SECOND) for name in "ab"]
    page = drawn(tmp_path, [RUN, *leases, *ends])
    assert len({bar["y"] for bar in page.all("rect", "hold")}) == 2


def test_a_fault_of_several_nodes_is_one_bar(tmp_path: Path) -> None:
    """What hit them at one moment is told once, with all of them; what came later has a bar of its own."""
    hit = [Fault("node-blank", f"node {number}", SECOND, 9 * SECOND) for number in (0, 2)]
    hit += [Fault("node-blank", "node 1", 4 * SECOND, 12 * SECOND)]
    page = drawn(tmp_path, [RUN, acquisition(1, 0, SECOND), release(1, 14 * SECOND), *hit])
    assert "node 0, node 2" in page.words
    bars = [bar for bar in page.all("rect", "fault") if bar["class"] == "fault" and bar["height"] == "16"]
    assert len({bar["y"] for bar in bars}) == len(bars) == 2


def test_a_long_run_makes_a_page_of_bounded_size(tmp_path: Path) -> None:
    """A hundred times the leases, and a storm of errors, do not make a page that nobody would open."""
    names = [f"order:{number}" for number in range(300)]
    records = MadeUp(workers=40, resources=names, seconds=100, hold=0.1, pauses=40).records()
    began = BEGAN + 50 * SECOND
    records += [
        Failure(
            number % 40, names[number % 300], began, began + number * MILLISECOND // 30, "QuorumError", "none"
        )
        for number in range(30_000)
    ]
    acquired = sum(isinstance(record, Acquisition) for record in records)
    drawn(tmp_path, records)
    assert acquired > 15_000
    assert (tmp_path / "report.html").stat().st_size < 2 * MEGABYTE


def test_ticks_are_round_and_few() -> None:
    """Whatever is shown, from microseconds to days, has between two and seven named times."""
    for power in range(4, 15):
        for factor in (1, 2.5, 7):
            window = Window(0, 123, 123 + int(factor * 10**power))
            names = [words for _, words in window.ticks()]
            assert 2 <= len(set(names)) == len(names) <= 7, (power, factor, names)


@pytest.mark.parametrize(
    ("nanoseconds", "words"),
    [(870_400, "870 µs"), (12_340_000, "12.3 ms"), (999_700_000, "1.00 s"), (4.56e9, "4.56 s")],
)
def test_durations_have_three_digits(nanoseconds: float, words: str) -> None:
    """Enough to compare, few enough to read."""
    assert duration(nanoseconds).replace("\u00a0", " ") == words


def test_long_durations_are_in_minutes_and_hours() -> None:
    """Nobody reads 1205 s."""
    assert duration(1205 * SECOND).replace("\u00a0", " ") == "20 min 5 s"
    assert duration(7500 * SECOND).replace("\u00a0", " ") == "2 h 5 min"


def test_a_log_scale_holds_all_that_it_was_made_for() -> None:
    """Whole powers of ten, at least two of them, even for a single number."""
    scale = LogScale.around(1500, 1500, top=0, height=100)
    assert [power for _, power in scale.ticks()] == [1000, 10_000]
    assert 0 < scale.place(1500) < 100
