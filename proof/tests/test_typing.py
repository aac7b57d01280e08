"""A user's mypy --strict accepts a program that uses fencelock, and finds its mistakes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fencelock

PROGRAM = Path(__file__).with_name("typed_program.py")


@pytest.mark.long
def test_program_that_uses_every_public_name_is_typed(tmp_path: Path) -> None:
    """Checked in a folder of its own, with no settings but --strict."""
    shutil.copy(PROGRAM, tmp_path / "program.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_program_uses_every_public_name() -> None:
    """Each more than once: imported and used."""
    words = re.findall(r"\w+", PROGRAM.read_text())
    assert [name for name in fencelock.__all__ if words.count(name) < 2] == []
