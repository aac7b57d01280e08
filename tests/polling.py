"""Waiting in tests for other processes and threads, which act in their own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

#: Settings of a Redlock for tests whose nodes hang or die: it does not wait for them for long.
IMPATIENT: Final[dict[str, Any]] = {"node_timeout": 0.3, "connect_timeout": 1.0, "outage_grace": 0.3}


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Poll until a condition holds; False if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
