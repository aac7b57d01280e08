"""Stands for `pip` where a page says what to install: checks that this environment has just that.

fencelock is this checkout: an extra of it must exist and be complete. Any other package must be installed.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution, requires
from typing import Final

from packaging.requirements import Requirement

OURS: Final = "fencelock"


def check(wanted: str) -> None:
    """Exit with a sentence if something is not installed."""
    extras: set[str] = set()
    name, _, rest = wanted.partition("[")
    if name == OURS:
        extras = set(filter(None, rest.removesuffix("]").split(",")))
        known = set(distribution(OURS).metadata.get_all("Provides-Extra") or ())
        if not extras <= known:
            sys.exit(f"{OURS} has no extra {', '.join(extras - known)}")
        for line in requires(OURS) or ():
            needed = Requirement(line)
            if needed.marker and any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                distribution(needed.name)
        return
    distribution(Requirement(wanted).name)


if __name__ == "__main__":
    if sys.argv[1] != "install":
        sys.exit(f"pip {sys.argv[1]} is not what a page should tell")
    for argument in sys.argv[2:]:
        if not argument.startswith("-"):
            check(argument)
