"""README's install line and its program work in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from proof.pages.blocks import ROOT, blocks, read

README = tuple(blocks(read("README.md")))
PROGRAM = next(block.text for block in README if block.language == "python")
SHOWN = next(block.text for block in README if block.language == "text")
#: Worker A goes on in the block of the program after B, with the token that it had before.
LATE = """
from fencelock import Lease, StaleTokenError, bind
with fenced_lock("account:1") as token: ...
with fenced_lock("account:1"), Session(engine) as session, session.begin():
    session.get_one(Account, 1).balance += 50
try:
    with Session(engine) as session, session.begin():
        bind(session, Lease("account:1", token))
        session.get_one(Account, 1).balance -= 30
except StaleTokenError as error:
    print(f"{type(error).__name__}: {error}")
with Session(engine) as session:
    print(session.get_one(Account, 1).balance)
"""


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command and return how it ended."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has what README's first line installs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    assert run(sys.executable, "-m", "venv", folder, folder=folder).returncode == 0
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    wheel = run(*pip, "download", "--no-deps", "--dest", folder / "wheel", "typing-extensions", folder=folder)
    if wheel.returncode:
        pytest.skip(f"no registry of packages is reachable: {wheel.stderr.strip().splitlines()[-1]}")
    (line,) = next(block.text for block in README if "pip install" in block.text).splitlines()
    assert line == "pip install fencelock"
    installed = run(*pip, "install", "--quiet", ROOT, folder=folder)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.mark.long
@pytest.mark.timeout(400)
def test_program_runs_and_a_late_worker_gets_what_is_shown(python: Path, tmp_path: Path) -> None:
    """Twice in a row, without a warning. The balance has what was not late."""
    (tmp_path / "shop.py").write_text(PROGRAM)
    for _ in range(2):
        ended = run(python, "-W", "error", "shop.py", folder=tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    (tmp_path / "late.py").write_text(f"from shop import *\n{LATE}")
    ended = run(python, "-W", "error", "late.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    wanted = re.escape(SHOWN).replace("…", ".*") + "300\n"
    assert re.fullmatch(wanted, ended.stdout), ended.stdout


def test_program_comes_first_and_is_short() -> None:
    """At most 60 words before it, and at most 15 lines of it."""
    before, _, _ = read("README.md").partition(PROGRAM)
    assert len(re.findall(r"[\w'-]+", before)) <= 60
    assert len(PROGRAM.splitlines()) <= 15
