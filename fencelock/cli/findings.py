"""What `fencelock doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, its place, and what to do. It is a note, unless locks or data are in danger."""

    where: str
    what: str
    advice: str
    is_problem: bool = True


note: Final = partial(Finding, is_problem=False)
