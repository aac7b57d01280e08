"""The checker finds each broken promise, and only those.

By hand: for each rule a history that breaks it, and the legal one that comes closest. At random: legal
histories pass, and with one violation put into them they do not.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proof.torture import checker
from proof.torture.checker import Rule, Verdict, check
from proof.torture.history import (
    HELD_UP,
    Acquisition,
    Cut,
    Failure,
    Fault,
    HistoryError,
    Outcome,
    Record,
    Release,
    Row,
    Style,
    Write,
)
from tests.torture.facts import RUN, acquisition, release, row, save, write


def judge(*records: Record) -> Verdict:
    """Judge a history that consists of these."""
    return check([RUN, *records])


def broken(*records: Record) -> dict[Rule, int]:
    """Return how often a history of these breaks each rule."""
    return dict(judge(*records).broken)


def test_one_holder_after_another_with_larger_tokens_is_right() -> None:
    """A sequence of growing tokens, with gaps, has no violation and no overlap."""
    verdict = judge(*(acquisition(token, token * 10, token * 10 + 5) for token in (1, 2, 5, 9)))
    assert verdict.right
    assert verdict.overlaps == verdict.valid_overlaps == 0
    assert (verdict.acquisitions, verdict.resources) == (4, 1)


def test_a_token_given_twice_is_found() -> None:
    """Two concurrent acquisitions with one token break uniqueness, and nothing else."""
    verdict = judge(acquisition(7, 0, 10), acquisition(7, 5, 15, worker=3))
    assert verdict.broken == {Rule.UNIQUE_TOKENS: 1}
    assert str(verdict.violations[0]) == "P1: r: token 7 was given twice, to workers 0 and 3"


def test_a_token_given_three_times_is_found_twice() -> None:
    """Each repetition counts."""
    assert broken(*(acquisition(7, 0, 10) for _ in range(3))) == {Rule.UNIQUE_TOKENS: 2}


def test_tokens_of_different_resources_may_be_equal_and_in_any_order() -> None:
    """Promises are made for each resource alone."""
    records = [acquisition(2, 0, 1, resource="a"), acquisition(2, 2, 3, resource="b")]
    assert judge(*records, acquisition(1, 4, 5, resource="c")).right


def test_a_token_below_an_earlier_completed_one_is_found() -> None:
    """A smaller token for somebody who began after the larger one was known breaks the order."""
    verdict = judge(acquisition(8, 11, 20), acquisition(9, 0, 10))
    assert verdict.broken == {Rule.ORDERED_TOKENS: 1}
    assert "token 8 was asked for 0.000 ms after 9 had been given" in str(verdict.violations[0])


def test_a_repeated_token_one_after_the_other_breaks_both_promises() -> None:
    """Larger means larger, not larger or equal."""
    assert broken(acquisition(9, 0, 10), acquisition(9, 11, 20)) == {
        Rule.UNIQUE_TOKENS: 1,
        Rule.ORDERED_TOKENS: 1,
    }


def test_tokens_of_concurrent_acquisitions_may_come_in_any_order() -> None:
    """Nothing is promised about the order in which clients learn of their tokens."""
    assert judge(acquisition(9, 0, 10), acquisition(8, 10, 20)).right


def test_the_largest_earlier_token_counts_not_the_last() -> None:
    """A token is compared with all that had completed, also with one long before the last."""
    verdict = judge(acquisition(9, 0, 10), acquisition(3, 5, 15), acquisition(5, 16, 20))
    assert [str(found) for found in verdict.violations] == [
        "P2: r: token 5 was asked for 0.000 ms after 9 had been given"
    ]


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


def test_overlapping_holders_are_counted_and_are_no_violation() -> None:
    """Who overstays overlaps with the next holder; the tokens are still right."""
    verdict = judge(
        acquisition(1, 0, 10, valid_until=30), release(1, 50), acquisition(2, 5, 31), release(2, 40)
    )
    assert verdict.right
    assert (verdict.overlaps, verdict.valid_overlaps, verdict.overstayed) == (1, 0, 1)


def test_overlaps_within_the_validity_are_counted_apart() -> None:
    """A second holder while the first had still been promised to be alone."""
    verdict = judge(acquisition(1, 0, 10), release(1, 50), acquisition(2, 5, 31), release(2, 40))
    assert (verdict.overlaps, verdict.valid_overlaps, verdict.overstayed) == (1, 1, 0)


def test_a_hold_ends_with_its_process() -> None:
    """Who was killed held until then; a hold of which nothing more is known lasted no time."""
    killed = Fault("worker-kill", "worker 0", 20, 25)
    holds = (acquisition(1, 0, 10), acquisition(2, 12, 15, worker=1))
    assert judge(*holds).overlaps == 0
    assert judge(*holds, killed).overlaps == 1
    assert judge(*holds, replace(killed, target="worker 1")).overlaps == 0
    assert judge(*holds, replace(killed, began=5)).overlaps == 0


def test_additions_one_after_the_other_are_right() -> None:
    """Also with a refused, a failed and an unknown one between them."""
    records = [
        write(1, 0, 5, 0),
        write(3, 6, 8, 1),
        write(1, 9, 10, None, Outcome.REFUSED),
        write(3, 11, 12, 2, Outcome.UNKNOWN),
        write(3, 13, 14, 2, Outcome.FAILED),
        write(3, 15, 16, 2),
    ]
    assert judge(*records, row(3, 3)).right
    assert judge(*records, row(4, 4)).right
    assert judge(*records).right


def test_two_additions_that_read_the_same_value_are_found() -> None:
    """One of them has undone the other, and the row shows it."""
    records = [write(1, 0, 5, 0), write(2, 3, 6, 0)]
    assert broken(*records) == {Rule.NO_LOST_UPDATE: 1}
    verdict = judge(*records, row(1, 2))
    assert verdict.broken == {Rule.NO_LOST_UPDATE: 2}
    assert verdict.lost_updates == 1


def test_one_of_the_two_may_have_failed() -> None:
    """Only what was acknowledged may not be undone."""
    for outcome in (Outcome.FAILED, Outcome.UNKNOWN, Outcome.REFUSED):
        assert judge(write(1, 0, 5, 0, outcome), write(2, 6, 9, 0), row(1, 2)).right


def test_a_row_with_fewer_or_more_additions_than_were_made_is_found() -> None:
    """Each acknowledged addition is there; nothing is there that nobody can have sent."""
    records = [write(1, 0, 5, 0), write(2, 6, 9, 1), write(2, 10, 11, 2, Outcome.UNKNOWN)]
    assert [judge(*records, row(value, 2)).right for value in (1, 2, 3, 4)] == [False, True, True, False]
    assert judge(row(0, None)).right
    assert broken(row(1, None)) == {Rule.NO_LOST_UPDATE: 1}


def test_a_value_that_was_read_and_is_gone_is_found() -> None:
    """Also where the number of additions adds up."""
    assert broken(write(1, 0, 5, 7), row(1, 1)) == {Rule.NO_LOST_UPDATE: 1}


def test_a_write_below_an_earlier_token_is_found() -> None:
    """The row had seen the larger token before the smaller one was sent."""
    records = [write(5, 0, 5, 0), write(4, 6, 9, 1)]
    assert broken(*records, row(2, 5)) == {Rule.NO_STALE_ACCEPT: 1}
    assert judge(replace(records[0], ended=6), records[1], row(2, 5)).right
    assert judge(*records[:1], replace(records[1], outcome=Outcome.REFUSED), row(1, 5)).right


def test_a_write_with_a_token_that_had_been_refused_is_found() -> None:
    """A refusal says that the row has a larger fence."""
    refused = write(4, 0, 5, None, Outcome.REFUSED)
    assert broken(refused, write(4, 6, 9, 0)) == {Rule.NO_STALE_ACCEPT: 1}
    assert judge(refused, write(5, 6, 9, 0)).right


def kept(ended: int, error: str = "LockLostError", worker: int = 1) -> list[Record]:
    """Return a lease of 100 that a worker kept from 0 on, and how it ended."""
    return [
        Acquisition(worker, "kept 1", 0, 1, 7, 100, kept=True),
        Release(worker, "kept 1", 7, ended - 1, ended, error),
    ]


def test_a_lease_that_was_kept_and_lost_is_found() -> None:
    """While nothing was broken, or only what a lease has to outlive."""
    assert broken(*kept(5000)) == {Rule.LEASE_KEPT: 1}
    bearable = [Fault(fault, "node 0", 4900, 5000) for fault in ("node-rolling", "node-blank", "node-flush")]
    assert broken(*kept(5000), *bearable) == {Rule.LEASE_KEPT: 1}
    assert broken(*kept(5000, ""), *bearable) == {}
    assert broken(*kept(5000, HELD_UP), *bearable) == {}


@pytest.mark.parametrize("fault", ["node-pause", "clock", "partition", "something new"])
def test_a_lease_may_be_lost_to_a_fault_that_hits_a_majority_or_the_time(fault: str) -> None:
    """As long as that lasts, and until the lease could have been extended again."""
    assert broken(*kept(5000), Fault(fault, "node 2", 4850, 4860)) == {}
    assert broken(*kept(5000), Fault(fault, "node 2", 4000, 4700)) == {Rule.LEASE_KEPT: 1}


def test_a_lease_may_be_lost_by_a_worker_that_was_paused() -> None:
    """But not where another was."""
    assert broken(*kept(5000), Fault("worker-pause", "worker 1", 4000, 4990)) == {}
    assert broken(*kept(5000), Fault("worker-pause", "worker 11", 4000, 4990)) == {Rule.LEASE_KEPT: 1}


def test_a_lease_that_was_not_kept_may_end() -> None:
    """Whoever works on after his lease has ended hears so."""
    assert broken(acquisition(7, 0, 1), release(7, 200, error="LockLostError")) == {}


def test_whoever_is_told_that_the_list_is_wrong_is_found() -> None:
    """In the words that were used; other errors are no violation."""
    verdict = judge(Failure(3, "r", 1, 2, "MembershipError", "the nodes do not agree"))
    assert verdict.broken == {Rule.RIGHT_LIST: 1}
    assert str(verdict.violations[0]) == "wrong list: r: worker 3 was told: the nodes do not agree"
    assert judge(Failure(3, "r", 1, 2, "QuorumError", "too few")).right


def test_a_fence_below_a_token_that_had_written_is_found() -> None:
    """The fence may be larger: a holder may have claimed without writing. Or there is none."""
    for fence, rules in ((4, {Rule.FENCE_ABOVE: 1}), (5, {}), (6, {}), (None, {})):
        assert broken(write(5, 0, 5, 0), row(1, fence)) == rules


def test_the_longest_time_without_any_acquisition_is_found() -> None:
    """While somebody wanted one: time in which nobody asked does not count, failures do."""
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


def test_facts_that_contradict_themselves_are_refused() -> None:
    """Times that go backwards, two runs or none, a row that is found twice."""
    contradictions: list[list[Record]] = [
        [RUN, acquisition(1, 10, 5)],
        [RUN, Fault("node-pause", "node 1", 3, 2)],
        [acquisition(1, 5, 10)],
        [RUN, RUN],
        [RUN, row(1, 1), row(1, 1)],
    ]
    for records in contradictions:
        with pytest.raises(HistoryError):
            check(records)


def test_the_program_says_right_and_wrong_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 and 1 for a history, with the verdict in the last line; a cut line is counted and no harm."""
    legal: list[Record] = [RUN, acquisition(1, 0, 5), write(1, 6, 7, 0), row(1, 1)]
    assert checker.main([str(save(tmp_path / "right", [*legal, Cut("{", 1)]))]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "RIGHT: every promise was kept"
    assert "cut lines       1" in said
    assert checker.main([str(save(tmp_path / "wrong", [*legal, acquisition(1, 3, 4)]))]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "WRONG: 1 P1"


def test_the_program_refuses_what_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and a sentence for a broken file, a missing one, and no arguments."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\n")
    (tmp_path / "empty").touch()
    (tmp_path / "prose").write_text("Call me Ishmael.\n")
    for name in ("binary", "empty", "prose", "missing"):
        assert checker.main([str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "cannot be judged" in said.err
    assert checker.main([]) == 2


def test_it_is_a_program_of_its_own(tmp_path: Path) -> None:
    """Its exit status is the verdict."""
    wrong = save(tmp_path / "wrong", [RUN, acquisition(1, 0, 5), acquisition(1, 3, 4)])
    command = [sys.executable, "-m", "proof.torture.checker", str(wrong)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "WRONG: 1 P1")


@dataclass(frozen=True, slots=True)
class Legal:
    """A legal history of one resource, and what a violation can be made of."""

    acquired: list[Acquisition]
    released: list[Release]
    written: list[Write]
    found: Row

    @property
    def records(self) -> list[Record]:
        """All of it."""
        return [RUN, *self.acquired, *self.released, *self.written, self.found]

    @property
    def end(self) -> int:
        """A time after everything."""
        return max([*(one.ended for one in self.released), *(one.ended for one in self.written)])


@st.composite
def legal_histories(draw: st.DrawFn) -> Legal:
    """Make histories as a storage with a fence would: late and stale writers, lost answers, overlaps."""
    steps = draw(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=12)
    )
    clock = token = 0
    acquired = []
    for worker, (gap, wait, above) in enumerate(steps):
        clock, token = clock + gap, token + above
        acquired.append(acquisition(token, max(0, clock - wait), clock, worker=worker))
    for at, (first, second) in enumerate(itertools.pairwise(acquired)):
        if second.began <= first.completed and draw(st.booleans()):
            acquired[at : at + 2] = [replace(first, token=second.token), replace(second, token=first.token)]
            break
    written, value, fence = [], 0, 0
    when = acquired[0].completed
    for who, gap, late, lost in draw(
        st.lists(
            st.tuples(st.integers(0, 11), st.integers(1, 9), st.integers(0, 20), st.booleans()), max_size=15
        )
    ):
        when += gap
        holders = [one for one in acquired if one.completed < when]
        holder = holders[who % len(holders)]
        read: int | None = value
        if holder.token < fence:
            outcome, read = Outcome.REFUSED, None
        else:
            fence, value = holder.token, value + 1
            outcome = Outcome.UNKNOWN if lost else Outcome.ACKNOWLEDGED
        written.append(write(holder.token, when, when + late, read, outcome))
    end = max(when, clock) + 50
    released = [release(one.token, end, worker=one.worker) for one in acquired]
    return Legal(acquired, released, written, row(value, fence))


@given(legal_histories(), st.randoms())
def test_legal_histories_pass(legal: Legal, rng: random.Random) -> None:
    """In whatever order their lines come."""
    records = legal.records
    rng.shuffle(records)
    verdict = check(records)
    assert verdict.violations == ()
    assert verdict.lost_updates == 0


def give_a_token_twice(legal: Legal, index: int) -> Sequence[Record]:
    """Let somebody else have been given a token at the same time."""
    return [replace(legal.acquired[index % len(legal.acquired)], worker=99)]


def give_a_smaller_token(legal: Legal, index: int) -> Sequence[Record]:
    """Let somebody ask after everybody, and be given a token in between or below."""
    free = set(range(max(one.token for one in legal.acquired))) - {one.token for one in legal.acquired}
    return [acquisition(sorted(free)[index % len(free)], legal.end + 1, legal.end + 2)]


def build_on_an_old_value(legal: Legal, index: int) -> Sequence[Record]:
    """Let somebody add to what another had added to; the row has not noticed."""
    done = [one for one in legal.written if one.outcome is Outcome.ACKNOWLEDGED]
    return [replace(done[index % len(done)], worker=99)] if done else []


def write_with_an_old_token(legal: Legal, index: int) -> Sequence[Record]:
    """Let somebody with a smaller token add to the row after everybody; nobody knows of another addition."""
    done = [one for one in legal.written if one.outcome is Outcome.ACKNOWLEDGED]
    if not done:
        return []
    fence = max(one.token for one in done)
    late = write(index % fence, legal.end + 1, legal.end + 2, legal.found.value)
    return [late]


VIOLATIONS: list[tuple[Callable[[Legal, int], Sequence[Record]], Rule, int]] = [
    (give_a_token_twice, Rule.UNIQUE_TOKENS, 0),
    (give_a_smaller_token, Rule.ORDERED_TOKENS, 0),
    (build_on_an_old_value, Rule.NO_LOST_UPDATE, 0),
    (write_with_an_old_token, Rule.NO_STALE_ACCEPT, 1),
]


@pytest.mark.parametrize(("violate", "rule", "added"), VIOLATIONS)
@given(legal=legal_histories(), index=st.integers(0, 100))
def test_one_violation_is_found(
    violate: Callable[[Legal, int], Sequence[Record]], rule: Rule, added: int, legal: Legal, index: int
) -> None:
    """Whatever legal history it is hidden in, and none else; the row has seen `added` additions of it."""
    wrong = violate(legal, index)
    found = replace(legal.found, value=legal.found.value + added * len(wrong))
    verdict = check([*legal.records[:-1], found, *wrong])
    assert set(verdict.broken) <= {rule}
    assert bool(verdict.violations) == bool(wrong)


@given(legal=legal_histories(), rows=st.sampled_from(["value", "fence"]))
def test_a_wrong_row_is_found(legal: Legal, rows: str) -> None:
    """One addition too few, or a fence too low, whatever has happened before."""
    done = [one for one in legal.written if one.outcome is Outcome.ACKNOWLEDGED]
    if not done:
        return
    value = {"value": len(done) - 1, "fence": max(one.token for one in done) - 1}[rows]
    wrong = Row("r", value, legal.found.fence) if rows == "value" else replace(legal.found, fence=value)
    rule = {"value": Rule.NO_LOST_UPDATE, "fence": Rule.FENCE_ABOVE}[rows]
    assert set(check([*legal.records[:-1], wrong]).broken) == {rule}


class TestStyles:
    """What was written in which way."""

    @pytest.mark.parametrize("style", list(Style))
    def test_no_style_may_overwrite(self, style: Style) -> None:
        """An older holder writes twice, and another one between its read and its write."""
        overwriting = write(2, 60, 70, 1, style=style, fence=1, read_at=30)
        found = broken(write(1, 10, 20, 0), write(1, 40, 50, 1), overwriting, row(2, 2))
        assert found == {Rule.NO_LOST_UPDATE: 2}

    def test_a_refusal_for_what_was_read_says_nothing_of_the_fence(self) -> None:
        """It may be below the token that was refused, so a smaller one may be accepted later."""
        refused = write(5, 10, 20, 0, Outcome.REFUSED, error="StaleReadError")
        assert judge(refused, write(4, 30, 40, 0), row(1, 4)).right
        refused = replace(refused, error="StaleTokenError")
        assert broken(refused, write(4, 30, 40, 0), row(1, 4)) == {Rule.NO_STALE_ACCEPT: 1}

    def test_writes_are_counted_by_style(self) -> None:
        """And refusals by their error."""
        refused = write(2, 10, 20, 0, Outcome.REFUSED, error="StaleReadError", style=Style.GET)
        verdict = judge(write(3, 30, 40, 0), refused, row(1, 3))
        assert verdict.styles == {
            Style.CLAIM: {Outcome.ACKNOWLEDGED: 1},
            Style.GET: {Outcome.REFUSED: 1},
        }
        assert verdict.refusals == {"StaleReadError": 1}
