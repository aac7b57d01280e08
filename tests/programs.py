"""Programs of Python that a test starts, and waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: Seconds within which each of them ends, also on a busy machine.
SECONDS = 100


def python(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, however it ends; it has the environment of the tests where none is given."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        input=typed,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def printed(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run Python, which has to succeed, and return what it printed."""
    ended = python(*arguments, cwd=cwd, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
