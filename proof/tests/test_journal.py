"""The history takes over the journal of a worker that was killed, and allows for its last write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from proof.tests.facts import acquisition, write
from proof.torture.history import Cut, Outcome, Record, Write, read_records
from proof.torture.journal import Journal, Life, history_lines


def read(path: Path) -> list[Record]:
    """Return what the journal of worker 4, which was dead at time 99, adds to the history."""
    return list(read_records(history_lines(Life(4, path, 99))))


def test_an_intention_whose_outcome_is_known_leaves_no_trace(tmp_path: Path) -> None:
    """The write itself says all that there is to say."""
    done = write(7, 10, 12, 3)
    with Journal(tmp_path / "journal") as journal:
        journal.note(acquisition(7, 1, 2))
        journal.intend(replace(done, outcome=Outcome.UNKNOWN))
        journal.note(done)
    assert read(tmp_path / "journal") == [acquisition(7, 1, 2), done]


def test_a_write_under_way_when_its_worker_was_killed_has_an_unknown_outcome(tmp_path: Path) -> None:
    """It may have been committed; the history must allow for it."""
    with Journal(tmp_path / "journal") as journal:
        journal.intend(write(7, 10, 11, 3, Outcome.UNKNOWN))
    (found,) = read(tmp_path / "journal")
    assert isinstance(found, Write)
    assert (found.outcome, found.began, found.ended, found.error) == (Outcome.UNKNOWN, 10, 99, "WorkerKilled")


def test_a_second_try_with_the_same_token_is_another_write(tmp_path: Path) -> None:
    """One outcome settles one intention."""
    with Journal(tmp_path / "journal") as journal:
        for began in (10, 20):
            journal.intend(write(7, began, began, 3, Outcome.UNKNOWN))
        journal.note(write(7, 10, 15, 3, Outcome.FAILED))
    assert [one.outcome for one in read(tmp_path / "journal") if isinstance(one, Write)] == [
        Outcome.FAILED,
        Outcome.UNKNOWN,
    ]


def test_the_line_that_a_worker_was_killed_in_is_cut(tmp_path: Path) -> None:
    """It is kept as what it is, so that others may follow it in the history."""
    with Journal(tmp_path / "journal") as journal:
        journal.note(acquisition(7, 1, 2))
    with (tmp_path / "journal").open("a") as file:
        file.write('{"kind":"rele')
    assert read(tmp_path / "journal") == [acquisition(7, 1, 2), Cut('{"kind":"rele', 4)]
