"""Calls a function after a fork; some operating systems cannot fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_child(call: Callable[[], object]) -> None:
    """Call a function in each forked child, if the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
