"""What listening costs: CPU time of an acquisition and a release, with and without, in turns.

    python -m benchmarks.observing

Each turn locks 5 nodes some hundred times: with nothing that listens, with a listener that does nothing, with
metrics for Prometheus, with those of OpenTelemetry, without and with spans. The differences are taken turn by
turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry

from fencelock import Redlock, _events, forget, on_event
from fencelock._events import Listener
from fencelock.observe import prometheus
from fencelock.observe.otel import FencelockInstrumentor
from proof.servers import Nodes

TASKS = 100


def nothing(_event: object) -> None:
    """Listen and do nothing."""


def listeners() -> dict[str, Listener | None]:
    """Return who listens in turn."""
    metrics = prometheus.instrument(CollectorRegistry())
    forget(metrics)
    ways: dict[str, Listener | None] = {
        "nothing listens, again": None,
        "a listener that does nothing": nothing,
        "Prometheus": metrics,
    }
    for name, tracers in (("without", NoOpTracerProvider()), ("with", TracerProvider())):
        instrumentor = FencelockInstrumentor()
        instrumentor.instrument(tracer_provider=tracers, meter_provider=MeterProvider())
        ways[f"OpenTelemetry, {name} spans"] = _events.listeners[-1]
        instrumentor.uninstrument()
    return ways


def blocking(authority: Redlock, count: int) -> float:
    """Return the CPU seconds of each of so many locks, one after the other."""
    locks = [authority.lock(f"order:{number}") for number in range(TASKS)]
    began = time.process_time()
    for number in range(count):
        with locks[number % TASKS]:
            pass
    return (time.process_time() - began) / count


def waiting(authority: Redlock, count: int, runner: asyncio.Runner) -> float:
    """Return the CPU seconds of each of so many locks, of 100 tasks side by side."""

    async def work(number: int) -> None:
        lock = authority.lock(f"order:{number}")
        for _ in range(count // TASKS):
            async with lock:
                pass

    async def main() -> float:
        began = time.process_time()
        await asyncio.gather(*map(work, range(TASKS)))
        return (time.process_time() - began) / count

    return runner.run(main())


def compare(name: str, measure: Callable[[], float], turns: int, ways: dict[str, Listener | None]) -> None:
    """Print what each way adds."""
    without: list[float] = []
    added: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, listener in random.sample(list(ways.items()), len(ways)):
            before = measure()
            if listener is not None:
                on_event(listener)
            during = measure()
            if listener is not None:
                forget(listener)
            after = measure()
            if turn:  # the first one warms up
                without += before, after
                added[way].append(during / ((before + after) / 2) - 1)
    base = statistics.median(without)
    low, _, high = statistics.quantiles(without, n=4)
    print(f"{name}: {base * 1e6:.0f} µs of CPU a lock ({low * 1e6:.0f} … {high * 1e6:.0f})")
    for way, found in added.items():
        low, middle, high = (100 * each for each in statistics.quantiles(found, n=4))
        print(f"  {way:30} {middle:+5.1f} % ({low:+.1f} … {high:+.1f})", flush=True)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--locks", type=int, default=200, help="in each turn")
    given = parser.parse_args()
    with Nodes(5) as nodes, Redlock(nodes.urls) as authority, asyncio.Runner() as runner:
        authority.init()
        count, ways = given.locks, listeners()
        compare("blocking", lambda: blocking(authority, count), given.turns, ways)
        of_tasks = partial(waiting, authority, count, runner)
        compare(f"asyncio, {TASKS} tasks", of_tasks, given.turns, ways)
        runner.run(authority.aio.close())


if __name__ == "__main__":
    main()
