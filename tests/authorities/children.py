"""How a test runs one of the `programs` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT


def run(program: str, url: str) -> Any:
    """Run one of the programs; return what it printed last."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.authorities.programs", program, url],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])
