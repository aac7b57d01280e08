"""The first thing that a reader does: README's install line, and its file, in an empty environment."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages.blocks import ROOT, blocks, read

README = tuple(blocks(read("README.md")))


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
    _, _, wanted = shlex.split(line, comments=True)
    assert re.fullmatch(r"fencelock\[[a-z,]+\]", wanted), f"{line} installs another package"
    checkout = f"{ROOT}{wanted.removeprefix('fencelock')}"
    installed = run(*pip, "install", "--quiet", checkout, folder=folder)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.mark.long
@pytest.mark.timeout(400)
def test_first_file_prints_a_refusal(python: Path, tmp_path: Path) -> None:
    """It prints what README shows, twice in a row, and no warning."""
    (file,) = (block for block in README if block.file)
    shown = next(block for block in README if block.line > file.line and block.language == "text")
    wanted = re.escape(shown.text).replace("…", ".*")
    (tmp_path / (file.file or "")).write_text(file.text)
    for _ in range(2):
        ended = run(python, "-W", "error", file.file or "", folder=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert re.fullmatch(wanted, ended.stdout), ended.stdout
        assert not ended.stderr


@pytest.mark.long
@pytest.mark.timeout(400)
def test_command_line_is_there(python: Path, tmp_path: Path) -> None:
    """README goes on with `fencelock init`."""
    ended = run(python.with_name("fencelock"), "init", "--help", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
