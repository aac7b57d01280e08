"""Releases that a thread sends later: see `line/due.py`."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from fencelock.authority.line.due import Due, DueReleases

#: Seconds for which a caller waits for another one that comes to the same line.
_APART = 0.3


def test_two_callers_at_once_start_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Thread] = []
    both = threading.Barrier(2)
    make, start = threading.Thread.__init__, threading.Thread.start

    def make_together(self: threading.Thread, *arguments: Any, **named: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(_APART)
        make(self, *arguments, **named)

    def note(self: threading.Thread) -> None:
        begun.append(self)
        start(self)

    releases = DueReleases(lambda _nonce, _due: True)
    sent_at = time.monotonic() + _APART
    with ThreadPoolExecutor(2) as callers:
        list(callers.map(time.sleep, [0.1, 0.1]))  # the executor has its threads now
        monkeypatch.setattr(threading.Thread, "__init__", make_together)
        monkeypatch.setattr(threading.Thread, "start", note)
        due = Due(("r",), sent_at, math.inf, in_doubt=False)
        list(callers.map(releases.plan, ["1", "2"], [due, due]))
    assert len(begun) == 1
