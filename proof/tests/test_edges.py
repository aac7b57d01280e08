"""The faults at the edges strike where they are to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from proof.tests.test_torture import torture
from proof.torture.edges import STRIKE, Strikes, Struck

pytestmark = [pytest.mark.timed, pytest.mark.long]


def test_a_handler_strikes_in_exposed_calls_and_nowhere_else() -> None:
    """Once for each call, and only in the main thread."""
    before = signal.getsignal(STRIKE)
    try:
        strikes = Strikes()
        os.kill(os.getpid(), STRIKE)
        with pytest.raises(Struck):
            strikes.expose(partial(os.kill, os.getpid(), STRIKE))()
        os.kill(os.getpid(), STRIKE)
        found: list[Callable[[], int]] = []
        thread = threading.Thread(target=lambda: found.append(strikes.expose(int)))
        thread.start()
        thread.join()
        assert found == [int]
    finally:
        signal.signal(STRIKE, before)


def test_a_run_with_all_of_them_ends_right(tmp_path: Path) -> None:
    """Each was made; `make proof` has each alone, and its control."""
    faults = ("signal", "line-freeze", "odd-value", "partial-write", "lie")
    chosen = [word for fault in faults for word in ("--fault", fault)]
    settings = ("--duration", "6", "--every", "0.2", "--workers", "3", "--nodes-count", "3", "--ttl", "1")
    where = ("--writes", "0", "--database", "sqlite", "--output", tmp_path / "out")
    result = torture(*chosen, *settings, *where)
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(f" {fault}" in result.stdout for fault in faults)
