"""What `inspect` costs others: latency of locks while 100,000 are listed, again and again.

python -m benchmarks.inspecting
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import redis

from fencelock import Redlock
from proof.servers import Nodes


def fill(nodes: Nodes, count: int) -> None:
    """Have so many locks be held, on every node."""
    for url in nodes.urls:
        with redis.Redis.from_url(url) as node:
            for start in range(0, count, 10_000):
                with node.pipeline(transaction=False) as pipe:
                    for number in range(start, min(count, start + 10_000)):
                        pipe.set(
                            f"{{fencelock}}:l:order:{number}", f"{'f' * 43}|0|{number + 1}", px=3_600_000
                        )
                    pipe.execute()


def latencies(authority: Redlock, seconds: float) -> list[float]:
    """Return the milliseconds that each lock took to acquire and release."""
    found, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        with authority.lock("mine"):
            pass
        found.append(1000 * (time.monotonic() - began))
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--locks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5)
    given = parser.parse_args()
    with Nodes(5) as nodes, Redlock(nodes.urls) as authority, Redlock(nodes.urls) as operator:
        authority.init()
        fill(nodes, given.locks)
        latencies(authority, 1)
        over = threading.Event()
        took: list[float] = []

        def inspect() -> None:
            while not over.is_set():
                began = time.monotonic()
                assert len(operator.inspect()) >= given.locks
                took.append(time.monotonic() - began)

        for name in ("alone", "while all are listed"):
            thread = threading.Thread(target=inspect)
            if name != "alone":
                thread.start()
            found = sorted(latencies(authority, given.seconds))
            over.set()
            if name != "alone":
                thread.join()
            p50, p99 = statistics.median(found), found[int(0.99 * len(found))]
            print(
                f"{name:22} {len(found):6} locks, p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {found[-1]:.2f}"
            )
            over.clear()
        print(f"{given.locks} locks are listed in {min(took):.1f} s")
        slowest = 0
        for url in nodes.urls:
            with redis.Redis.from_url(url) as node:
                slowest = max([slowest, *(entry["duration"] for entry in node.slowlog_get(100))])
        print(f"longest script on a node: {slowest / 1000 or 'less than 10'} ms")


if __name__ == "__main__":
    main()
