"""The judge of `benchmarks.history` finds each broken promise, and only those."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from benchmarks.history import Acquisition, Failure, judge, read_log, write_line


def acquisition(
    token: int,
    began: int,
    completed: int,
    *,
    resource: str = "r",
    worked_until: int | None = None,
    valid_until: int = 1_000_000,
) -> Acquisition:
    """Make a record; the holder stops at once unless told otherwise."""
    end = completed if worked_until is None else worked_until
    return Acquisition(resource, began, completed, token, valid_until, end)


def test_one_holder_after_another_with_larger_tokens_is_right() -> None:
    """A sequence of growing tokens, with gaps, has no violation and no overlap."""
    verdict = judge([acquisition(token, token * 10, token * 10 + 5) for token in (1, 2, 5, 9)])
    assert verdict.violations == []
    assert verdict.overlaps == verdict.valid_overlaps == 0


def test_a_token_given_twice_is_found() -> None:
    """Two concurrent acquisitions with one token break uniqueness, and nothing else."""
    verdict = judge([acquisition(7, 0, 10), acquisition(7, 5, 15)])
    assert len(verdict.duplicates) == 1
    assert verdict.regressions == []
    assert "token 7 was given twice" in str(verdict.violations[0])


def test_a_token_given_three_times_is_found_twice() -> None:
    """Each repetition counts."""
    assert len(judge([acquisition(7, 0, 10) for _ in range(3)]).duplicates) == 2


def test_tokens_of_different_resources_may_be_equal_and_in_any_order() -> None:
    """Promises are made for each resource alone."""
    records = [acquisition(2, 0, 1, resource="a"), acquisition(2, 2, 3, resource="b")]
    records += [acquisition(1, 4, 5, resource="c")]
    assert judge(records).violations == []


def test_a_token_below_an_earlier_completed_one_is_found() -> None:
    """A smaller token for somebody who began after the larger one was known breaks the order."""
    early, late = acquisition(9, 0, 10), acquisition(8, 11, 20)
    verdict = judge([late, early])
    assert [(found.earlier, found.later) for found in verdict.regressions] == [(early, late)]
    assert "token 8 was asked for 0.000 ms after 9 had been given" in str(verdict.violations[0])


def test_a_repeated_token_one_after_the_other_breaks_both_promises() -> None:
    """Larger means larger, not larger or equal."""
    verdict = judge([acquisition(9, 0, 10), acquisition(9, 11, 20)])
    assert len(verdict.duplicates) == len(verdict.regressions) == 1


def test_tokens_of_concurrent_acquisitions_may_come_in_any_order() -> None:
    """Nothing is promised about the order in which clients learn of their tokens."""
    assert judge([acquisition(9, 0, 10), acquisition(8, 10, 20)]).violations == []


def test_the_largest_earlier_token_counts_not_the_last() -> None:
    """A token is compared with all that had completed, also with one long before the last."""
    records = [acquisition(9, 0, 10), acquisition(3, 5, 15), acquisition(5, 16, 20)]
    verdict = judge(records)
    assert [(found.earlier.token, found.later.token) for found in verdict.regressions] == [(9, 5)]


def test_the_judge_agrees_with_the_definition() -> None:
    """On random histories the sweep finds what comparing every pair finds."""
    rng = random.Random(1)
    broken = 0
    for _ in range(300):
        records = []
        for _ in range(8):
            began = rng.randrange(30)
            completed = began + rng.randrange(10)
            records.append(acquisition(began + rng.randrange(1, 12), began, completed))
        verdict = judge(records)
        pairs = [(a, b) for a in records for b in records if a.completed < b.began and b.token <= a.token]
        assert {id(found.later) for found in verdict.regressions} == {id(later) for _, later in pairs}
        assert len(verdict.duplicates) == len(records) - len({one.token for one in records})
        broken += bool(verdict.regressions)
    assert 50 < broken < 250


def test_overlapping_holders_are_counted_and_are_no_violation() -> None:
    """Who overstays overlaps with the next holder; the tokens are still right."""
    overstayer = acquisition(1, 0, 10, worked_until=50, valid_until=30)
    verdict = judge([overstayer, acquisition(2, 5, 31, worked_until=40)])
    assert verdict.violations == []
    assert (verdict.overlaps, verdict.valid_overlaps) == (1, 0)


def test_overlaps_within_both_validities_are_counted_apart() -> None:
    """Two holders who had both been promised to be alone."""
    verdict = judge([acquisition(1, 0, 10, worked_until=50), acquisition(2, 5, 31, worked_until=40)])
    assert (verdict.overlaps, verdict.valid_overlaps) == (1, 1)


def test_times_that_go_backwards_are_refused() -> None:
    """A log whose clock cannot be trusted is not judged."""
    with pytest.raises(ValueError, match="go backwards"):
        acquisition(1, 10, 5)


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Acquisitions and failures survive the way through the file."""
    records: list[Acquisition | Failure] = [
        acquisition(1 << 62, 0, 10),
        Failure("r", 3, 4, "QuorumError", 'two "quoted"\nlines — é'),
    ]
    text = io.StringIO()
    for record in records:
        write_line(text, record)
    (tmp_path / "log").write_text(text.getvalue())
    assert list(read_log(tmp_path / "log")) == records
