"""What some systems have and others have not."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_forked_child(call: Callable[[], object]) -> None:
    """Have a function called in each child that is forked, where processes can be forked."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
