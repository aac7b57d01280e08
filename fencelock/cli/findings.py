"""The findings of `fencelock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final


@dataclass(frozen=True, slots=True)
class Finding:
    """A place, a fact, and advice: a problem if locks or data are in danger, else a note."""

    where: str
    what: str
    advice: str
    is_problem: bool = True


note: Final = partial(Finding, is_problem=False)
