"""The table of mutants has a row for each, all are noticed; some recorded seeds notice again.

`python -m proof.simulation.mutants --replay`, which is a part of `make proof`, plays all of these seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fencelock.authority.redlock.membership import establish
from fencelock.authority.redlock.membership.reports import NodeReport
from fencelock.authority.redlock.protocol import acquire
from proof.simulation import mutants
from proof.simulation.mutants import MUTANTS, ROOT, TABLE, left_out, main, recorded, replay

ROWS = recorded()
SOME = ("no write-back", "locks on voters only", "nothing is owed", "no claim", "slots given back")


def test_table_has_a_row_for_every_mutant() -> None:
    """In the same order, with the same rules; nothing is left that nothing notices."""
    assert {mutant.name: mutant.rule for mutant in MUTANTS} == {
        name: cells[0] for name, cells in ROWS.items()
    }
    assert list(ROWS) == [mutant.name for mutant in MUTANTS]
    assert not [name for name, cells in ROWS.items() if "**nothing**" in cells[1]]


def is_there(control: str) -> bool:
    """Return whether a file has a test of that name."""
    file, _, name = control.partition("::")
    return f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text()


def test_named_schedules_exist() -> None:
    assert [mutant.name for mutant in MUTANTS if mutant.control and not is_there(mutant.control)] == []


@pytest.mark.parametrize("name", SOME)
def test_recorded_seed_notices_again(name: str) -> None:
    """The same seed breaks the same promise, and none where the rule is kept. Another seed does not do."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert not replay(mutant, ROWS[name])
    rule, noticed, size, seed, acquisitions = ROWS[name]
    assert replay(mutant, [rule, noticed.replace(": ", ": not "), size, seed, acquisitions])


def test_search_comes_to_the_same_row(capsys: pytest.CaptureFixture[str]) -> None:
    """From seed 0 on, the very row of the table comes out; nothing is written."""
    before = TABLE.read_text()
    assert main(["no guard", "--seeds", "3"]) == 0
    assert capsys.readouterr().out == f"| {' | '.join(['no guard', *ROWS['no guard']])} |\n"
    assert TABLE.read_text() == before


def test_replay_of_a_changed_table_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mutant without a row is told, and one whose seed shows nothing."""
    changed = TABLE.read_text().replace("| no claim |", "| no clame |")
    monkeypatch.setattr(mutants, "TABLE", tmp_path / "mutants.md")
    mutants.TABLE.write_text(changed.replace("a stale write was accepted", "P1"))
    assert main(["--replay", "no claim", "no guard"]) == 2
    said = capsys.readouterr().out
    assert "no claim: no row" in said
    seed = ROWS["no guard"][3]
    assert f"no guard, seed {seed}: simulation: a stale write was accepted, and not simulation: P1" in said


def test_what_was_left_out_is_there_again() -> None:
    """A mutant is gone when its search has ended."""

    def shipped() -> list[object]:
        again, closed = NodeReport.still_promises, NodeReport.__dict__["closed"]
        return [acquire._decide, establish.promise, again, closed]

    before = shipped()
    for mutant in MUTANTS:
        with left_out(mutant):
            pass
    assert shipped() == before
