"""A release has its list of materials, its section of the changelog, and its workflows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from proof.pages.blocks import ROOT
from proof.release import __main__ as release
from proof.release import materials

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_list_of_materials_is_that_of_the_project() -> None:
    """`python -m proof.release.materials` writes it."""
    assert materials.FILE.read_text() == materials.render()


@pytest.mark.parametrize(
    ("tag", "changelog", "says"),
    [
        ("v9.9.9", "## 9.9.9 - 2026-01-01\n", "the tag is v9.9.9, and pyproject.toml has version"),
        ("VERSION", "## Unreleased\n", "CHANGELOG.md has no section"),
        ("VERSION", "## VERSION - not released yet\n", "CHANGELOG.md has no section"),
        ("VERSION", "## VERSION - 2026-01-01\n", ""),
    ],
)
def test_nothing_is_published_without_its_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, changelog: str, says: str
) -> None:
    """The section has the version of the tag and of the project, and a date."""
    version = release.PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(changelog.replace("VERSION", version))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)  # a fork's hosted CI has another
    if not says:
        release.check_changelog(f"v{version}")
        return
    with pytest.raises(release.NotReadyError, match=re.escape(says)):
        release.check_changelog(tag.replace("VERSION", version))


def test_lowest_versions_are_read_from_the_project() -> None:
    """Each dependency has a lower bound, so that the check of a release installs it."""
    assert {re.split(r"[\[=]", line)[0] for line in release.lowest()} >= {
        "redis",
        "sqlalchemy",
        "alembic",
        "rich",
    }


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_are_there(workflow: Path) -> None:
    """With the variables that the Makefile has, and the parts that .ci/run has."""
    text, script = workflow.read_text(), (ROOT / ".ci" / "run").read_text()
    calls = re.findall(r"run: make (.+)", text)
    assert calls or "run: bash .ci/run" in text
    for part in re.findall(r'part: \[?"(\w+)"', text):
        assert re.search(rf"(?m)^ +{part}\)", script), part
    for call in [*calls, *(re.findall(r"^ *make (\w+)$", script, re.MULTILINE) if not calls else ())]:
        words = re.sub(r"\$\{\{[^}]*\}\}", "x", call)
        target = words.split()[0]
        make = shutil.which("make") or "make"
        done = subprocess.run([make, "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for variable in re.findall(r"([A-Z]+)=", words):
            assert re.search(rf"\$\({variable}\)|^{variable} ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_help_shows_each_target() -> None:
    """Ten, and no others: longer runs are commands of Python, which proof/ and benchmarks/ tell."""
    make = (ROOT / "Makefile").read_text()
    shown = re.findall(r'@echo "make ([a-z-]+) ', make)
    (phony,) = re.findall(r"^\.PHONY: help (.+)$", make, re.MULTILINE)
    assert shown == phony.split()
    assert len(shown) == 10


def test_a_release_of_another_repository_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`[project.urls]` names the repository that publishes."""
    source = release.PROJECT["urls"]["Source"]
    monkeypatch.setenv("GITHUB_REPOSITORY", "another/fencelock")
    with pytest.raises(release.NotReadyError, match="correct pyproject"):
        release.check_changelog(release.PROJECT["version"])
    monkeypatch.setenv("GITHUB_REPOSITORY", "/".join(source.split("/")[-2:]))
    release.check_changelog(release.PROJECT["version"])
