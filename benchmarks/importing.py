"""How long `import fencelock` takes, beside the libraries that it needs.

    python -m benchmarks.importing

Each turn imports each subject once, in a process of its own, in a new order. SQLAlchemy is the floor, because
fencelock imports it. Shown are the median and the quartiles in milliseconds, the ratio to the floor, and the
number of modules.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
from typing import Final

TURNS: Final = 21
SUBJECTS: Final = {
    "sqlalchemy and its ORM": "import sqlalchemy.orm",
    "fencelock": "import sqlalchemy.orm, fencelock",
    "fencelock, and Redlock is used": "import sqlalchemy.orm, fencelock; fencelock.Redlock",
    "redis": "import redis",
}
PROGRAM: Final = """
import sys, time
began = time.perf_counter()
{}
print(time.perf_counter() - began, len(sys.modules))
"""


def taken(statement: str) -> tuple[float, int]:
    """Return how many milliseconds a statement takes in a new process, and how many modules are loaded."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement)], capture_output=True, text=True, check=True
    )
    seconds, modules = ended.stdout.split()
    return float(seconds) * 1000, int(modules)


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    modules: dict[str, int] = {}
    for _ in range(TURNS):
        for name in random.sample([*SUBJECTS], len(SUBJECTS)):
            milliseconds, modules[name] = taken(SUBJECTS[name])
            times[name].append(milliseconds)
    floor = statistics.median(next(iter(times.values())))
    print("| import | ms | middle half | ÷ SQLAlchemy | modules |\n|---|---|---|---|---|")
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"| {name} | {middle:.0f} | {low:.0f} … {high:.0f} | {middle / floor:.2f} | {modules[name]} |")


if __name__ == "__main__":
    main()
