"""What goes wrong during `benchmarks.acquisitions`: nodes that die and come back blank, and pauses.

Less than a majority of the nodes are the victims. Each is killed one to three times, when the run has
come to randomly chosen points, and comes back blank every time: it must not vote before the workers have
admitted it again, in a new epoch. Whoever votes writes the lock, so a blank node that was sent scripts and
holds no lock has not voted. Apart from that, random workers and nodes are paused, so that messages come late.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import redis

from fencelock.embedded import Node, Nodes

_KILL, _RESTART = "is killed", "comes back blank"


class Faults:
    """Injects faults as the run goes on, and watches the blank nodes.

    Args:
        nodes: all of them.
        workers: process ids to pause now and then.
        rng: decides everything.
        pauses: how many a second, on average.

    Attributes:
        victims: how many nodes lose their memory.
        kills: how often one is killed.
        pauses: how many pauses of a worker or a node there have been.
        admissions: how many blank nodes have been admitted again.
        scripts: how many scripts blank nodes have been sent.
        voted: what blank nodes held that nobody may have written there.
    """

    def __init__(self, nodes: Nodes, workers: Sequence[int], rng: random.Random, *, pauses: float) -> None:
        self._nodes = nodes
        self._workers = workers
        self._rng = rng
        self._pause_rate = pauses
        self._next_pause = self._draw_next_pause()
        self._blank: set[int] = set()
        self.victims = (len(nodes) - 1) // 2
        self._schedule = self._draw_schedule()
        self.kills = self.pauses = self.scripts = self.admissions = 0
        self.voted: set[str] = set()

    def _draw_next_pause(self) -> float:
        gap = self._rng.expovariate(self._pause_rate) if self._pause_rate else float("inf")
        return time.monotonic() + gap

    def _draw_schedule(self) -> list[tuple[float, int, str]]:
        """Return at what share of the run which node suffers what."""
        schedule = []
        for victim in self._rng.sample(range(len(self._nodes)), self.victims):
            deaths = self._rng.randint(1, 3)
            moments = sorted(self._rng.uniform(0.05, 0.90) for _ in range(2 * deaths))
            schedule += [(moment, victim, (_KILL, _RESTART)[i % 2]) for i, moment in enumerate(moments)]
        return sorted(schedule)

    def advance(self, progress: float) -> list[str]:
        """Do what is due at this share of the run; return sentences about it."""
        events = []
        while self._schedule and self._schedule[0][0] <= progress:
            _, victim, what = self._schedule.pop(0)
            if what is _KILL:
                self._kill(victim)
            else:
                self._nodes[victim].restart(keep_data=False)
                self._blank.add(victim)
            events.append(f"node {victim} {what}")
        if time.monotonic() >= self._next_pause:
            self._pause_somebody()
            self._next_pause = self._draw_next_pause()
        return events

    def inspect(self) -> None:
        """Look at what the blank nodes hold: no lock, unless they have been admitted again."""
        for victim in sorted(self._blank):
            with _client(self._nodes[victim]) as client, client.pipeline(transaction=True) as at_once:
                keys, epoch = at_once.keys("{fencelock}:l:*").hget("{fencelock}", "e").execute()
            if epoch is None:
                self.voted.update(f"node {victim}, blank since its restart, holds {key!r}" for key in keys)
                continue
            self._blank.remove(victim)
            self.admissions += 1
            if epoch == b"0":
                self.voted.add(f"node {victim} was admitted in an epoch in which it may have voted before")

    def finish(self) -> None:
        """Look at the blank nodes for the last time, while they still run."""
        self.inspect()
        for victim in self._blank:
            self.scripts += _scripts_run(self._nodes[victim])

    def _kill(self, victim: int) -> None:
        self.inspect()
        if victim in self._blank:
            self.scripts += _scripts_run(self._nodes[victim])
            self._blank.remove(victim)
        self._nodes[victim].kill()
        self.kills += 1

    def _pause_somebody(self) -> None:
        pid = self._rng.choice([*self._workers, *(node.pid for node in self._nodes if node.is_running)])
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(self._rng.uniform(0.02, 0.4))
        finally:
            os.kill(pid, signal.SIGCONT)
        self.pauses += 1


def _client(node: Node) -> redis.Redis:
    return redis.Redis.from_url(node.url, socket_timeout=5.0)


def _scripts_run(node: Node) -> int:
    with _client(node) as client:
        stats: Any = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{verb}", {"calls": 0})["calls"] for verb in ("eval", "evalsha"))
