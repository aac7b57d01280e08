"""Histories of runs that never were, but might have been: for tests that need many lines, or certain ones.

A seed makes the same history every time. Workers take turns at their resources; some are paused while they
hold one, come back after its lease has gone to somebody else, and are refused; nodes are paused, and once so
many that nobody gets a lock.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fencelock.tokens import compose
from proof.torture.history import (
    VERSION,
    Acquisition,
    Failure,
    Fault,
    Outcome,
    Record,
    Release,
    Row,
    Run,
    Write,
    write_record,
)

SECOND = 1_000_000_000
BEGAN = 5_000 * SECOND
#: How long leases are.
TTL = 2 * SECOND


@dataclass(slots=True)
class MadeUp:
    """A history that is being made up.

    Attributes:
        seed: of everything that is left to chance.
        workers: how many.
        resources: their names.
        seconds: how long the run is.
        hold: how long a worker works under a lease, in seconds on average.
        writes: the share of leases under which something is written.
        pauses: how many workers are paused while they work.
        outage: whether a majority of the nodes once hangs for a second.
    """

    seed: int = 1
    workers: int = 6
    resources: Sequence[str] = ("order:1", "order:2", "stock:7")
    seconds: float = 20
    hold: float = 0.08
    writes: float = 0.7
    pauses: int = 5
    outage: bool = True
    _made: list[Record] = field(default_factory=list)
    _held: list[Acquisition] = field(default_factory=list)
    _wrote: list[tuple[int, Acquisition]] = field(default_factory=list)

    def records(self) -> list[Record]:
        """Return the history."""
        chance = random.Random(self.seed)
        length = int(self.seconds * SECOND)
        self._made = [_run(self.seed, self.workers), *self._node_faults(chance, length)]
        pauses = {int((number + 1) * length / (self.pauses + 1)) for number in range(self.pauses)}
        self._work(chance, length, sorted(pauses))
        self._made += self._outcomes()
        return self._made

    def write(self, path: Path) -> Path:
        """Write the history to a file; return its path."""
        with path.open("w", encoding="utf-8") as history:
            for record in self.records():
                write_record(history, record)
        return path

    def _node_faults(self, chance: random.Random, length: int) -> Iterator[Fault]:
        for kind, share in (("node-pause", 0.12), ("node-blank", 0.3), ("partition", 0.8)):
            began = BEGAN + int(share * length)
            ended = began + int(chance.uniform(0.03, 0.07) * length)
            yield Fault(kind, f"node {chance.randrange(3)}", began, ended, "made up")
        if self.outage:
            began, ended = self._outage(length)
            yield Fault("node-pause", "node 0", began, ended)
            yield Fault("node-pause", "node 1", began, ended, "with node 0, so that there is no majority")

    def _outage(self, length: int) -> tuple[int, int]:
        began = BEGAN + length // 2
        return began, began + (SECOND if self.outage else 0)

    def _work(self, chance: random.Random, length: int, pauses: list[int]) -> None:
        free_at: dict[str, int] = dict.fromkeys(self.resources, 0)
        counters: Counter[str] = Counter()
        turns = [(BEGAN + chance.randrange(SECOND // 5), worker) for worker in range(self.workers)]
        outage = self._outage(length)
        while turns:
            now, worker = heapq.heappop(turns)
            if now > BEGAN + length:
                continue
            resource = chance.choice(self.resources)
            got = max(now, free_at[resource]) + int(chance.lognormvariate(0, 0.5) * SECOND / 800)
            if outage[0] < got < outage[1]:
                ended = min(now + SECOND // 2, outage[1] + SECOND // 4)
                self._made.append(
                    Failure(worker, resource, now, ended, "QuorumError", "1 of 3 nodes answered")
                )
                heapq.heappush(turns, (ended + SECOND // 20, worker))
                continue
            counters[resource] += 1
            epoch = int(got > BEGAN + 0.35 * length)
            token = compose(epoch, counters[resource] + 1_763_700_000_000 * (1 - epoch))
            lease = Acquisition(worker, resource, now, got, token, got + TTL)
            done = got + int(chance.expovariate(1 / self.hold) * SECOND)
            if pauses and got - BEGAN >= pauses[0]:
                pauses.pop(0)
                done = got + TTL + int(chance.uniform(0.3, 1.2) * SECOND)
                self._made.append(
                    Fault("worker-pause", f"worker {worker}", got + SECOND // 100, done - SECOND // 200)
                )
            free_at[resource] = min(done, lease.valid_until)
            self._hold(lease, done, writes=chance.random() < self.writes)
            heapq.heappush(
                turns, (done + SECOND // 500 + int(chance.expovariate(1 / self.hold) * SECOND), worker)
            )

    def _hold(self, lease: Acquisition, done: int, *, writes: bool) -> None:
        late = done > lease.valid_until
        error = "LockLostError" if late else ""
        release = Release(lease.worker, lease.resource, lease.token, done, done + SECOND // 900, error)
        self._made += [lease, release]
        self._held.append(lease)
        if writes or late:
            self._wrote.append((max(lease.completed, done - SECOND // 500), lease))

    def _outcomes(self) -> Iterator[Record]:
        """Yield what became of the writes, in the order of time, and what the rows were at the end."""
        values: Counter[str] = Counter()
        fences: Counter[str] = Counter()
        claims = deque(sorted(self._held, key=lambda lease: lease.completed))
        for sent, lease in sorted(self._wrote, key=lambda sent: sent[0]):
            while claims and claims[0].completed <= sent:
                claim = claims.popleft()
                fences[claim.resource] = max(fences[claim.resource], claim.token)
            name, token = lease.resource, lease.token
            refused = fences[name] > token
            outcome = Outcome.REFUSED if refused else Outcome.ACKNOWLEDGED
            error = "StaleTokenError" if refused else ""
            yield Write(lease.worker, name, token, sent, sent + SECOND // 1000, outcome, values[name], error)
            if not refused:
                values[name] += 1
        for name in self.resources:
            yield Row(name, values[name], fences[name])


def _run(seed: int, workers: int) -> Run:
    settings = {"seed": seed, "workers": workers, "ttl": TTL / SECOND}
    servers = {"nodes": "none: this history is made up", "database": "none"}
    return Run(VERSION, "0.1.0", "2026-01-02T03:04:05+00:00", BEGAN, settings, servers)
