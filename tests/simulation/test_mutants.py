"""The table of mutants: it has a row for each, every one is noticed, and the recorded seeds notice again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencelock.authority.redlock.membership import establish
from fencelock.authority.redlock.membership.reports import NodeReport
from fencelock.authority.redlock.protocol import acquire
from proof.simulation.mutants import MUTANTS, ROOT, TABLE, Mutant, hunt, left_out, main, row
from proof.simulation.run import play

#: Rows whose seed is not above this are searched for from the beginning.
QUICK = 4


def rows() -> dict[str, list[str]]:
    """Return the table's rows by the name of the mutant: what else stands in each."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    return {
        name: rest for name, *rest in ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    }


ROWS = rows()
FOUND = [mutant for mutant in MUTANTS if ROWS.get(mutant.name, ["", ""])[1].startswith("simulation")]


def test_table_has_a_row_for_every_mutant() -> None:
    """In the same order, with the same rules; nothing is left that nothing notices."""
    assert {mutant.name: mutant.rule for mutant in MUTANTS} == {
        name: cells[0] for name, cells in ROWS.items()
    }
    assert list(ROWS) == [mutant.name for mutant in MUTANTS]
    assert not [name for name, cells in ROWS.items() if "**nothing**" in cells[1]]


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.control], ids=lambda mutant: mutant.name)
def test_named_schedule_exists(mutant: Mutant) -> None:
    """What a row may name is a test of that name, in that file."""
    file, _, name = mutant.control.partition("::")
    assert f"def {name.partition('[')[0]}(" in Path(ROOT, file).read_text()


@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: mutant.name)
def test_recorded_seed_notices_again(mutant: Mutant) -> None:
    """The same seed breaks the same promise, and none where the rule is kept."""
    noticed, size, seed, _ = ROWS[mutant.name][1:]
    with left_out(mutant) as kept:
        found = play(int(seed), int(size), kept, run=mutant.run).violation
        assert f"{mutant.searched}: {found}" == noticed
    assert not play(int(seed), int(size), run=mutant.run).violation


@pytest.mark.parametrize(
    "mutant",
    [m for m in FOUND if ROWS[m.name][2] == "3" and int(ROWS[m.name][3]) <= QUICK],
    ids=lambda mutant: mutant.name,
)
def test_search_comes_to_the_same_row(mutant: Mutant) -> None:
    """From seed 0 on, the very row of the table comes out: no seed before notices, and the counts agree."""
    assert row(mutant, hunt(mutant, QUICK + 1)) == f"| {' | '.join([mutant.name, *ROWS[mutant.name]])} |"


def test_what_was_left_out_is_there_again() -> None:
    """A mutant is gone when its search has ended."""
    shipped = (acquire._decide, establish.promise, NodeReport.still_promises, NodeReport.__dict__["closed"])
    for mutant in MUTANTS:
        with left_out(mutant):
            pass
    assert shipped == (
        acquire._decide,
        establish.promise,
        NodeReport.still_promises,
        NodeReport.__dict__["closed"],
    )


def test_command_shows_one_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for one by name, it tells what notices, and writes nothing."""
    before = TABLE.read_text()
    assert main(["no guard", "--seeds", "3"]) == 0
    assert capsys.readouterr().out == f"| {' | '.join(['no guard', *ROWS['no guard']])} |\n"
    assert TABLE.read_text() == before
