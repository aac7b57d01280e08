"""The results of the changes so far: a line of JSON for each, and the page that sums them up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from proof.mutation.changes import Change
from proof.mutation.verdicts import Verdict

_SEEN = {"killed", "hung"}


class Results:
    """The verdicts in a file. The last one of a change counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.verdicts: dict[str, dict[str, Any]] = {}
        if file.exists():
            for facts in map(json.loads, file.read_text().splitlines()):
                self.verdicts[facts["identity"]] = facts

    def add(self, change: Change, diff: str, verdict: Verdict, commit: str) -> None:
        """Keep a verdict."""
        facts = {
            "identity": change.identity,
            "file": change.file,
            "line": change.line,
            "change": change.kind,
            "diff": diff,
            "commit": commit,
            **verdict.facts(),
        }
        self.verdicts[change.identity] = facts
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def todo(self, changes: Iterable[Change], *, again: bool) -> list[Change]:
        """Return the changes without a verdict, and with `again` those that no test has seen, too."""
        return [each for each in changes if not self._is_done(each, again=again)]

    def _is_done(self, change: Change, *, again: bool) -> bool:
        known = self.verdicts.get(change.identity)
        return known is not None and (not again or known["kind"] in _SEEN)

    def page(self, changes: Sequence[Change], scope: Sequence[str], about: Mapping[str, object]) -> str:
        """Return the page about some changes: the score, and what no test has seen."""
        known = [self.verdicts[each.identity] for each in changes if each.identity in self.verdicts]
        lines = [_HEAD, *(f"- {name}: {value}" for name, value in about.items())]
        lines += [f"- judged so far: {len(known)} of {len(changes)}", "", _TABLE]
        for folder in (*scope, ""):
            mine = [each for each in known if each["file"].startswith(folder)]
            lines.append(_row(folder or "all", mine))
        for kind, title in _TITLES.items():
            chosen = [each for each in known if each["kind"] == kind]
            chosen.sort(key=lambda each: (each["file"], each["line"]))
            lines += ["", f"## {title} ({len(chosen)})"]
            lines += [text for each in chosen for text in _entry(each)]
        return "\n".join([*lines, ""])


_HEAD = """\
# What the tests see

Written by `python -m proof.mutation`.
Each change alters one place of the library. The tests that run the place then
run in a copy of the checkout, in portions, until one fails, fails again, and passes without the change. The
score is the share of changes that a test sees.
"""
_TABLE = """\
| folder | judged | killed | hung | survived | of these tested in part | not covered | score |
|---|---|---|---|---|---|---|---|"""
_TITLES = {
    "survived": "Survived",
    "not covered": "Not covered: no test runs these lines in its own process",
    "hung": "Hung: a test did not end",
    "killed": "Killed",
}


def _row(name: str, verdicts: Sequence[Mapping[str, Any]]) -> str:
    kinds = Counter(each["kind"] for each in verdicts)
    parts = sum(each["kind"] == "survived" and each["ran"] < each["touching"] for each in verdicts)
    score = f"{sum(kinds[kind] for kind in _SEEN) / len(verdicts):.1%}" if verdicts else "–"
    cells = (kinds["killed"], kinds["hung"], kinds["survived"], parts, kinds["not covered"], score)
    return f"| {name} | {len(verdicts)} | {' | '.join(map(str, cells))} |"


def _entry(facts: Mapping[str, Any]) -> list[str]:
    place = f"{facts['file']}:{facts['line']}"
    if facts["kind"] == "killed":
        changed = [line.strip() for line in facts["diff"].splitlines()]
        return [f"- {place} `{changed[0]}` `{changed[-1]}`: `{facts['test']}`"]
    how = {
        "survived": f"{facts['ran']} of the {facts['touching']} tests that touch it passed",
        "hung": f"`{facts['test']}`",
    }
    text = f"{place}, {facts['change']} {facts['identity']}"
    text += f": {how[facts['kind']]}" if facts["kind"] in how else ""
    return ["", text, "```diff", facts["diff"], "```"]
