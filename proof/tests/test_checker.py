"""The checker finds each broken promise, and only those.

For each rule there are histories that break it, and legal ones that come close. `test_run.py` puts violations
into the history of a real run.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proof.tests.facts import RUN, acquisition, release, row, save, write
from proof.torture import checker
from proof.torture.checker import Rule, Verdict, check
from proof.torture.history import (
    HELD_UP,
    Acquisition,
    Cut,
    Failure,
    Fault,
    HistoryError,
    Left,
    Outcome,
    Record,
    Release,
    Style,
)


def judge(*records: Record) -> Verdict:
    """Judge a history that consists of these."""
    return check([RUN, *records])


def broken(*records: Record) -> dict[Rule, int]:
    """Return how often a history of these breaks each rule."""
    return dict(judge(*records).broken)


def kept(ended: int, error: str = "LockLostError") -> list[Record]:
    """Return a lease of 100 that worker 1 kept from 0 on, and how it ended."""
    return [
        Acquisition(1, "kept 1", 0, 1, 7, 100, kept=True),
        Release(1, "kept 1", 7, ended - 1, ended, error),
    ]


UNIQUE, ORDERED, LOST, STALE = (
    Rule.UNIQUE_TOKENS,
    Rule.ORDERED_TOKENS,
    Rule.NO_LOST_UPDATE,
    Rule.NO_STALE_ACCEPT,
)
REFUSED, UNKNOWN, FAILED = Outcome.REFUSED, Outcome.UNKNOWN, Outcome.FAILED
BEARABLE = [Fault(fault, "node 0", 4900, 5000) for fault in ("node-rolling", "node-blank", "node-flush")]
HISTORIES: dict[str, tuple[list[Record], dict[Rule, int]]] = {
    "growing tokens, with gaps": ([acquisition(t, t * 10, t * 10 + 5) for t in (1, 2, 5, 9)], {}),
    "other resources": ([acquisition(2, 0, 1, resource="a"), acquisition(1, 4, 5, resource="b")], {}),
    "given twice": ([acquisition(7, 0, 10), acquisition(7, 5, 15, worker=3)], {UNIQUE: 1}),
    "given three times": ([acquisition(7, 0, 10) for _ in range(3)], {UNIQUE: 2}),
    "concurrent, in any order": ([acquisition(9, 0, 10), acquisition(8, 10, 20)], {}),
    "below a completed one": ([acquisition(8, 11, 20), acquisition(9, 0, 10)], {ORDERED: 1}),
    "larger, not equal": ([acquisition(9, 0, 10), acquisition(9, 11, 20)], {UNIQUE: 1, ORDERED: 1}),
    "below one long before the last": (
        [acquisition(9, 0, 10), acquisition(3, 5, 15), acquisition(5, 16, 20)],
        {ORDERED: 1},
    ),
    "additions one after the other, and one that may have taken place": (
        [
            *(write(1, 0, 5, 0), write(3, 6, 8, 1), write(1, 9, 10, None, REFUSED)),
            *(write(3, 11, 12, 2, UNKNOWN), write(3, 13, 14, 2, FAILED), write(3, 15, 16, 2), row(4, 4)),
        ],
        {},
    ),
    "two read the same value": ([write(1, 0, 5, 0), write(2, 3, 6, 0)], {LOST: 1}),
    "two read the same value, as the row shows": (
        [write(1, 0, 5, 0), write(2, 3, 6, 0), row(1, 2)],
        {LOST: 2},
    ),
    **{
        f"one of the two was {outcome}": ([write(1, 0, 5, 0, outcome), write(2, 6, 9, 0), row(1, 2)], {})
        for outcome in (FAILED, UNKNOWN, REFUSED)
    },
    "an addition is missing": ([write(1, 0, 5, 0), write(2, 6, 9, 1), row(1, 2)], {LOST: 2}),
    "an addition that nobody has made": ([row(1, None)], {LOST: 1}),
    "an untouched row": ([row(0, None)], {}),
    "a value that was read is gone": ([write(1, 0, 5, 7), row(1, 1)], {LOST: 1}),
    "below an earlier token": ([write(5, 0, 5, 0), write(4, 6, 9, 1), row(2, 5)], {STALE: 1}),
    "below a concurrent token": ([write(5, 0, 6, 0), write(4, 6, 9, 1), row(2, 5)], {}),
    "below an earlier token, and refused": (
        [write(5, 0, 5, 0), write(4, 6, 9, 1, REFUSED), row(1, 5)],
        {},
    ),
    "with a token that had been refused": ([write(4, 0, 5, None, REFUSED), write(4, 6, 9, 0)], {STALE: 1}),
    "above a token that had been refused": ([write(4, 0, 5, None, REFUSED), write(5, 6, 9, 0)], {}),
    "refused for what was read, which says nothing of the fence": (
        [write(5, 10, 20, 0, REFUSED, error="StaleReadError"), write(4, 30, 40, 0), row(1, 4)],
        {},
    ),
    "the fence is below what was written": ([write(5, 0, 5, 0), row(1, 4)], {Rule.FENCE_ABOVE: 1}),
    "the fence is above it": ([write(5, 0, 5, 0), row(1, 6)], {}),
    "there is no fence": ([write(5, 0, 5, 0), row(1, None)], {}),
    "a kept lease was lost": (kept(5000), {Rule.LEASE_KEPT: 1}),
    "a kept lease was lost under what it has to outlive": ([*kept(5000), *BEARABLE], {Rule.LEASE_KEPT: 1}),
    "a kept lease was released": ([*kept(5000, ""), *BEARABLE], {}),
    "a kept lease of a process without time": ([*kept(5000, HELD_UP), *BEARABLE], {}),
    **{
        f"a kept lease was lost under {fault}": ([*kept(5000), Fault(fault, "node 2", 4850, 4860)], {})
        for fault in ("node-pause", "clock", "partition", "something new")
    },
    "a kept lease was lost long after a fault": (
        [*kept(5000), Fault("clock", "node 2", 4000, 4700)],
        {Rule.LEASE_KEPT: 1},
    ),
    "the keeper was paused": ([*kept(5000), Fault("worker-pause", "worker 1", 4000, 4990)], {}),
    "another was paused": (
        [*kept(5000), Fault("worker-pause", "worker 11", 4000, 4990)],
        {Rule.LEASE_KEPT: 1},
    ),
    "a lease that nobody kept": ([acquisition(7, 0, 1), release(7, 200, error="LockLostError")], {}),
    "told that the list is wrong": ([Failure(3, "r", 1, 2, "MembershipError")], {Rule.RIGHT_LIST: 1}),
    "told that nodes are missing": ([Failure(3, "r", 1, 2, "QuorumError")], {}),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_history_breaks_these_rules(name: str) -> None:
    """The one that its name tells of, or none."""
    records, rules = HISTORIES[name]
    assert broken(*records) == rules


@pytest.mark.parametrize("style", list(Style))
def test_no_style_may_overwrite(style: Style) -> None:
    """An older holder writes twice, and another one between its read and its write."""
    overwriting = write(2, 60, 70, 1, style=style, fence=1, read_at=30)
    assert broken(write(1, 10, 20, 0), write(1, 40, 50, 1), overwriting, row(2, 2)) == {LOST: 2}


def test_what_is_told_of_a_violation() -> None:
    assert [
        str(judge(*HISTORIES[name][0]).violations[0])
        for name in ("given twice", "below a completed one", "told that the list is wrong")
    ] == [
        "P1: r: token 7 was given twice, to workers 0 and 3",
        "P2: r: token 8 was asked for 0.000 ms after 9 had been given",
        "wrong list: r: worker 3 was told: ",
    ]


GENTLE = replace(RUN, settings={"faults": ["signal", "line-freeze", "odd-value"], "ttl": 1.0})
SECOND = 1_000_000_000
FROZEN = Fault("line-freeze", "worker 1", 0, 9 * SECOND)
AWAY, ODD, CLAIMED = (
    Failure(1, "r", 5 * SECOND, 6 * SECOND, error)
    for error in ("QuorumError", "ValueError", "LockTimeoutError")
)
EDGES: dict[str, tuple[list[Record], dict[Rule, int]]] = {
    "told that nodes are away, which are well": ([AWAY], {Rule.OUR_ERRORS: 1}),
    "told so beside an odd value": (
        [AWAY, Fault("odd-value", "resource r", 0, 9 * SECOND)],
        {Rule.OUR_ERRORS: 1},
    ),
    "told so when it woke": ([AWAY, FROZEN], {}),
    "told so while another is frozen": ([replace(AWAY, worker=2), FROZEN], {Rule.OUR_ERRORS: 1}),
    "the counter is none": ([AWAY, Fault("odd-value", "resource r", 0, 9 * SECOND, "a counter")], {}),
    "that of another is none": (
        [AWAY, Fault("odd-value", "resource s", 0, 9 * SECOND, "a counter")],
        {Rule.OUR_ERRORS: 1},
    ),
    "asked for both at once": (
        [AWAY, replace(AWAY, resource="s"), Fault("odd-value", "resource s", 0, 9 * SECOND, "a counter")],
        {},
    ),
    "an error of no library": ([ODD, FROZEN], {Rule.OUR_ERRORS: 1}),
    "others were faster": ([CLAIMED], {}),
    "a line that stands still": (
        [FROZEN, acquisition(1, 0, SECOND), acquisition(2, SECOND, 5 * SECOND)],
        {Rule.MOVING_LINE: 1},
    ),
    "a line that moves": (
        [FROZEN, *(acquisition(second, 0, second * SECOND) for second in (1, 3, 5, 7))],
        {},
    ),
    "a line that no other waits in": (
        [FROZEN, acquisition(1, 0, SECOND), acquisition(2, 4 * SECOND, 5 * SECOND)],
        {},
    ),
    "a line of the frozen one alone": (
        [FROZEN, acquisition(1, 0, SECOND), acquisition(2, SECOND, 5 * SECOND, worker=1)],
        {},
    ),
    "a lock is left": ([Left(1, "r", 5)], {Rule.NOTHING_LEFT: 1}),
}


@pytest.mark.parametrize("name", EDGES)
def test_more_is_promised_while_nodes_and_network_are_well(name: str) -> None:
    """The rules are about errors, lines and remains."""
    records, rules = EDGES[name]
    assert check([GENTLE, *records]).broken == rules


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=8))
def test_the_sweep_finds_what_comparing_every_pair_finds(facts: list[tuple[int, int, int]]) -> None:
    """On random histories the order of tokens is judged as by its definition."""
    records = [
        acquisition(began + ahead, began, began + took, worker=worker)
        for worker, (began, took, ahead) in enumerate(facts)
    ]
    found = broken(*records)
    late = {b.worker for a in records for b in records if a.completed < b.began and b.token <= a.token}
    assert found.get(Rule.ORDERED_TOKENS, 0) == len(late)
    assert found.get(Rule.UNIQUE_TOKENS, 0) == len(records) - len({one.token for one in records})


def test_two_primaries_have_no_order_and_give_no_token_twice() -> None:
    """While they live beside each other, and unless replication is synchronous, as promised."""
    split = Fault("two-primaries", "database 0", 2500, 9000)
    history = [acquisition(9, 1000, 2000), acquisition(8, 3000, 4000), acquisition(8, 5000, 6000, worker=1)]
    verdict = check([RUN, split, *history])
    assert (verdict.broken, verdict.disorders) == ({Rule.UNIQUE_TOKENS: 1}, 2)
    assert broken(*history, split, acquisition(7, 9500, 9600)) == {
        Rule.UNIQUE_TOKENS: 1,
        Rule.ORDERED_TOKENS: 1,
    }
    synchronous = replace(RUN, settings={"synchronous": True})
    assert check([synchronous, split, *history]).broken[Rule.ORDERED_TOKENS] == 2


def test_overlapping_holders_are_counted_and_are_no_violation() -> None:
    """Overlaps within the first hold's validity are counted apart.

    A killed worker held its lock until it was killed.
    """
    for valid_until, counts in ((30, (1, 0, 1)), (1_000_000, (1, 1, 0))):
        first = acquisition(1, 0, 10, valid_until=valid_until)
        verdict = judge(first, release(1, 50), acquisition(2, 5, 31), release(2, 40))
        assert verdict.right
        assert (verdict.overlaps, verdict.valid_overlaps, verdict.overstayed) == counts
    killed = Fault("worker-kill", "worker 0", 20, 25)
    holds = (acquisition(1, 0, 10), acquisition(2, 12, 15, worker=1))
    others = (killed, replace(killed, target="worker 1"), replace(killed, began=5))
    assert [judge(*holds, *fault).overlaps for fault in ([], *([each] for each in others))] == [0, 1, 0, 0]


def test_writes_are_counted() -> None:
    """By style, refusals by their error, and additions that are missing in the row."""
    refused = write(2, 10, 20, 0, REFUSED, error="StaleReadError", style=Style.GET)
    verdict = judge(write(3, 30, 40, 0), write(4, 50, 60, 1), refused, row(1, 4))
    assert verdict.styles == {Style.CLAIM: {Outcome.ACKNOWLEDGED: 2}, Style.GET: {REFUSED: 1}}
    assert (verdict.refusals, verdict.lost_updates) == ({"StaleReadError": 1}, 1)


def test_the_longest_time_without_any_acquisition_is_found() -> None:
    """Only time in which a caller wanted a lock counts.

    Time without a request does not count, but failures do.
    """
    verdict = judge(
        acquisition(1, 0, 10),
        acquisition(2, 500, 510),
        Failure(1, "r", 505, 530, "QuorumError"),
        Failure(1, "s", 530, 550, "LockTimeoutError"),
        acquisition(3, 540, 580, worker=2),
        acquisition(9, 560, 600, resource="s"),
    )
    assert (verdict.unavailable.began, verdict.unavailable.ended) == (510, 580)
    assert verdict.failures == {"QuorumError": 1, "LockTimeoutError": 1}
    assert judge().unavailable.seconds == 0.0


@pytest.mark.parametrize(
    "records",
    [
        [RUN, acquisition(1, 10, 5)],
        [RUN, Fault("node-pause", "node 1", 3, 2)],
        [acquisition(1, 5, 10)],
        [RUN, RUN],
        [RUN, row(1, 1), row(1, 1)],
    ],
)
def test_facts_that_contradict_themselves_are_refused(records: list[Record]) -> None:
    """Times that go backwards, two runs or none, a row that is found twice."""
    with pytest.raises(HistoryError):
        check(records)


def test_the_program_says_right_and_wrong_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is the last line; a cut line is no harm; a file that is no history is refused."""
    legal: list[Record] = [RUN, acquisition(1, 0, 5), write(1, 6, 7, 0), row(1, 1)]
    assert checker.main([str(save(tmp_path / "right", [*legal, Cut("{", 1)]))]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "RIGHT: every promise was kept"
    assert "cut lines       1" in said
    wrong = save(tmp_path / "wrong", [*legal, acquisition(1, 3, 4)])
    command = [sys.executable, "-m", "proof.torture.checker", str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "WRONG: 1 P1")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    (tmp_path / "empty").touch()
    (tmp_path / "prose").write_text("Call me Ishmael.\n")
    for name in ("binary", "empty", "prose", "missing"):
        assert checker.main([str(tmp_path / name)]) == 2
        assert "cannot be judged" in capsys.readouterr().err
    assert checker.main([]) == 2
