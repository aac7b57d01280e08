"""The model of the protocol: its two forms say the same. `make proof` explores it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

SPEC = Path(__file__).parents[1] / "spec"
MODEL = (SPEC / "Fencelock.tla").read_text()
EXPLORER = (SPEC / "explore.cpp").read_text()


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that runs the configurations."""
    monkeypatch.syspath_prepend(str(SPEC))
    return importlib.import_module("check")


def names_in(text: str, table: str) -> set[str]:
    """Return the switches in one of the explorer's tables."""
    rows = text[text.index(table) :].partition("};")[0]
    return set(re.findall(r'\{"(\w+)", &\w+\}', rows))


def mutants_of(text: str) -> set[str]:
    """Return the rules that can be left out, as the explorer names them."""
    return names_in(text, "rules = {")


def features_of(text: str) -> set[str]:
    """Return the optional parts, as the explorer names them."""
    return names_in(text, "flags = {")


@pytest.mark.parametrize(
    ("mutant", "violated", "finished", "complaint"),
    [
        ("", "P1", True, "the explorer found P1"),
        ("no_guard", "", True, "the explorer found no violation"),
        ("", "", False, "not finished"),
        ("", "", True, ""),
        ("no_guard", "P1", True, ""),
    ],
)
def test_what_is_not_as_it_must_be_is_said(
    check: Any, mutant: str, violated: str, finished: bool, complaint: str
) -> None:
    """A violation where none may be, none where one must be, a search cut short: all are wrong."""
    run = check.Run(name="one", mutant=mutant)
    found = check.Found(violated, 10, 5, 0.1, "", finished=finished)
    assert check.Outcome(run, found, None).wrong == complaint


def test_checkers_that_count_differently_are_not_believed(check: Any) -> None:
    """The explorer and TLC have the same actions only if they reach the same number of states."""
    outcome = check.Outcome(
        check.Run(name="one"), check.Found("", 10, 0, 0.1, ""), check.Found("", 11, 0, 1.0, "")
    )
    assert outcome.wrong == "TLC counted 11 states"


def test_model_and_explorer_have_the_same_actions() -> None:
    """What the explorer announces are the actions of the model's `Next`, by name."""
    following = MODEL.split("\nNext ==")[1].split("\nSpec ==")[0]
    actions = set(re.findall(r"\b([A-Z]\w+)\(|\\/ (Ghost\w+)", following)) - {("With", "")}
    announced = re.findall(r'emit\(t, (?:\w+ \? "[^"]*" : |all \? )?"(\w+)|"(\w+)", emit\)', EXPLORER)
    actions = {name for pair in actions for name in pair if name}
    assert actions == {name for pair in announced for name in pair if name}
    assert len(actions) > 20


def test_model_and_explorer_leave_out_the_same_rules_and_have_the_same_parts() -> None:
    """A mutant or a feature that only one of the two knows would silently do nothing in the other."""
    assert set(re.findall(r'Broken\("(\w+)"\)', MODEL)) == mutants_of(EXPLORER)
    narrowing = {"only_outcome", "unpromised"}  # which invariants are looked at, not what happens
    assert set(re.findall(r'With\("(\w+)"\)', MODEL)) == features_of(EXPLORER) - narrowing


def test_every_rule_is_left_out_once(check: Any) -> None:
    """Each rule of the model is left out in some configuration, which shows its purpose."""
    left_out = {rule for run in check.RUNS for rule in run.mutant.split(",")}
    assert left_out - {""} == mutants_of(EXPLORER)


def test_configurations_have_names_of_their_own(check: Any) -> None:
    """Names select the configurations to run, and tell rows of the tables apart."""
    names = [run.name for run in check.RUNS]
    assert len(set(names)) == len(names)


def test_results_in_the_readme_are_of_the_present_configurations(check: Any) -> None:
    """The checker writes the tables. A row whose bounds have changed since tells a result that no run had."""
    bounds = {run.name: run.bounds for run in check.RUNS}
    lines = (line for line in check.README.read_text().split("\n") if line.startswith("| "))
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    results = [row for row in rows if row not in check.TITLES.values() and row[0] != "---"]
    assert len(results) > 20
    assert {row[0]: row[1] for row in results} == {row[0]: bounds.get(row[0]) for row in results}
    assert not [row for row in results if "WRONG" in row[-1]]
    unseen = [run.name for run in check.RUNS if run.name not in {row[0] for row in results} and not run.long]
    assert not unseen
