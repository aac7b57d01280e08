"""The case of `benchmarks.locks` in which everything begins at once: how many locks the first second gives.

Each crowd is a process of its own that has used no lock before. Its threads, or greenlets, all lock for the
first time at the same moment, a resource each, on five nodes. Beside it stand a few threads whose connections
are warm, in the same rounds.

    python -m benchmarks.locks bursts
"""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.arena import NODES, NodesArena, median_ratio
from benchmarks.contenders import namespace_of
from benchmarks.report import Goal, Section, Spread
from fencelock import Redlock

WARM = 16
THREADS, GREENLETS = 100, 400
LIMIT = 0.8
#: Seconds in which locks are counted.
SECONDS = 1.0
#: Seconds for a process to begin and to end.
_PATIENCE = 30.0


def burst(arena: NodesArena) -> None:
    """Have each crowd begin, in turns."""
    crowds = [("warm threads", WARM), ("threads", THREADS)]
    if importlib.util.find_spec("gevent"):
        crowds += ("warm greenlets", WARM), ("greenlets", GREENLETS)
    rates: dict[tuple[str, int], list[float]] = {crowd: [] for crowd in crowds}
    for _ in arena.count_rounds("bursts"):
        for crowd in random.sample(crowds, len(crowds)):
            rates[crowd].append(_rate_of(*crowd, arena))
    ratios = {
        (kind, count): median_ratio(found, rates[f"warm {kind.removeprefix('warm ')}", WARM])
        for (kind, count), found in rates.items()
    }
    rows = [
        (
            f"{count} {kind}",
            f"{statistics.median(found):,.0f}",
            f"{Spread.of(found)}",
            f"{ratios[kind, count]:.2f}",
        )
        for (kind, count), found in rates.items()
    ]
    section = Section(
        f"The first second, {NODES} nodes",
        ("who locks", "per second", "slowest … fastest", "÷ warm"),
        rows,
        "Acquired and released by a process that has used no lock before; warm threads and greenlets have.",
    )
    goals = [
        Goal.at_least(f"first second of {count} {kind} ÷ {WARM} warm ones", LIMIT, ratios[kind, count])
        for kind, count in crowds
        if not kind.startswith("warm")
    ]
    arena.add(section, goals)


def _rate_of(kind: str, count: int, arena: NodesArena) -> float:
    urls = ",".join(node.url for node in arena.nodes)
    patched = (
        ["-m", "gevent.monkey"] if kind.endswith("greenlets") else []
    )  # before anything else is imported
    command = [sys.executable, *patched, __file__, kind, str(count), urls]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PATIENCE, env=paths)
    return float(done.stdout)


def _lock_at_once(count: int, urls: str, *, warm: bool) -> float:
    """Lock in so many threads; return how many locks a second there were."""
    authority = Redlock(urls, namespace=namespace_of(NODES))
    taken = [0] * count
    begins = time.monotonic() + 0.5
    ends = begins + SECONDS

    def work(number: int) -> None:
        lock = authority.lock(f"burst-{number}")
        if warm:
            with lock:
                pass
        time.sleep(max(0.0, begins - time.monotonic()))
        while time.monotonic() < ends:
            with lock:
                taken[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    authority.close()
    return sum(taken) / SECONDS


def main() -> None:
    """Be one crowd, and print its rate."""
    kind, count, urls = sys.argv[1:]
    sys.stdout.write(f"{_lock_at_once(int(count), urls, warm=kind.startswith('warm'))}\n")


if __name__ == "__main__":
    main()
