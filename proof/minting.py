"""Random histories of database servers that mint tokens, to compare ways to mint.

    python -m proof.minting --seeds 4000

A primary grants; standbys receive its log late. Primaries die and are replaced, with and without the part of
the log that the new one lacks; an old one comes back as a standby, is upgraded, or is restored from a backup;
clocks differ, and step. In a split brain the replaced primary lives on and grants beside the new one.

The shipped way, `time_and_server`, must give no token twice, and none below one that was complete, as long as
clocks differ by less than a failover or a restore takes. Outside of a split brain only: two primaries at once
have no order. The other ways are controls, and each of them must break.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: Milliseconds that a failover, or a restore from a backup, takes at least. Clocks differ by less.
OUTAGE: Final = 1000
_STEPS: Final = 80
_RESOURCES: Final = 3


@dataclass(slots=True)
class Row:
    """The last token of a resource, and which server minted it."""

    token: int
    minted_by: int


@dataclass(eq=False, slots=True)
class Server:
    """One server: what it has of the log, and what it knows of itself.

    Attributes:
        number: as `server_id` is.
        clock: by how many milliseconds it is off.
        start: tells this start of the server from those of others, below 1,024.
        log: what it has of all writes, in order: the resource (None for `base`) and the row.
        timeline: as PostgreSQL counts promotions.
    """

    number: int
    clock: int
    start: int
    log: list[tuple[int | None, Row]] = field(default_factory=list)
    timeline: int = 1

    def row(self, resource: int | None) -> Row:
        return next((row for name, row in reversed(self.log) if name == resource), Row(0, -1))


Scheme = Callable[[Server, Row, int], int]


def time_and_server(server: Server, own: Row, now: int) -> int:
    """As `authority/database/statements.py` has it: the time, and ten bits of the server's start."""
    return max((own.token >> 10) + 1, (server.row(None).token >> 10) + now) << 10 | server.start


def milliseconds(server: Server, own: Row, now: int) -> int:
    """Control: nothing tells two primaries apart."""
    return max(own.token + 1, server.row(None).token + now)


def timeline(server: Server, own: Row, now: int) -> int:
    """Control: an upgrade begins again at timeline 1, and two promotions may take the same number."""
    return max(own.token + 1, ((server.timeline - 1) << 44) + server.row(None).token + now)


def incarnation(server: Server, own: Row, now: int) -> int:
    """Control: a gap where another server has minted the row; one that comes back does not notice."""
    gap = 1 if own.minted_by in {server.number, -1} else 1 << 32
    return max(own.token + gap, server.row(None).token + now)


CONTROLS: Final[dict[str, Scheme]] = {
    "milliseconds": milliseconds,
    "timeline": timeline,
    "incarnation": incarnation,
}


class History:
    """One history by a seed.

    Attributes:
        twice: how many tokens were given twice.
        below: how many were below a token that was complete, outside of a split brain.
    """

    def __init__(self, seed: int, mint: Scheme, *, skew: int = OUTAGE // 2 - 1) -> None:
        self._random = random.Random(seed)
        self._mint, self._skew = mint, skew
        self._real = 1 << 40
        count = self._random.choice([2, 3])
        starts = self._random.sample(range(1024), count)
        self._servers = [
            Server(number, self._random.randint(-skew, skew), starts[number]) for number in range(count)
        ]
        self._primary = self._servers[0]
        self._replaced: Server | None = None
        self._given: set[tuple[int, int]] = set()
        self._complete: dict[int, int] = {}
        self._promotions = self._backed_up = 0
        self.twice = self.below = 0
        for _ in range(_STEPS):
            self._real += self._random.randint(1, 300)
            self._step()

    def _step(self) -> None:
        events: dict[Callable[[], None], float] = {
            self._grants: 60,
            self._receive: 20,
            lambda: self._restart(self._primary): 3,
            self._prune: 0.5,
            self._step_clock: 1.5,
        }
        if self._replaced is None:
            events |= {self._fail_over: 10, self._upgrade: 2, self._restore: 2, self._raise_base: 1}
        (event,) = self._random.choices(list(events), list(events.values()))
        event()

    def _grants(self) -> None:
        self._grant(self._primary)
        if self._replaced is not None:
            self._grant(self._replaced)
            if self._random.random() < 0.3:
                self._follow(self._replaced)
                self._replaced = None

    def _step_clock(self) -> None:
        each = self._random.choice(self._servers)
        each.clock = max(-self._skew, min(self._skew, each.clock + self._random.randint(-5, 5)))

    def _standbys(self) -> list[Server]:
        return [each for each in self._servers if each not in {self._primary, self._replaced}]

    def _now(self, server: Server) -> int:
        return self._real + server.clock

    def _grant(self, server: Server) -> None:
        resource = self._random.randrange(_RESOURCES)
        token = self._mint(server, server.row(resource), self._now(server))
        self.twice += (resource, token) in self._given
        self._given.add((resource, token))
        server.log.append((resource, Row(token, server.number)))
        if server is self._primary:
            self.below += self._replaced is None and token <= self._complete.get(resource, 0)
            self._complete[resource] = max(self._complete.get(resource, 0), token)

    def _receive(self) -> None:
        if not (standbys := self._standbys()):
            return
        standby, common = self._random.choice(standbys), 0
        for ours, theirs in zip(self._primary.log, standby.log, strict=False):
            if ours is not theirs:
                break
            common += 1
        standby.log = self._primary.log[: self._random.randint(common, len(self._primary.log))]

    def _follow(self, server: Server) -> None:
        """Let a server be a standby again: what it alone had is gone."""
        server.log = list(self._primary.log)
        self._restart(server)

    def _fail_over(self) -> None:
        standby, was = self._random.choice(self._standbys()), self._primary
        kind = self._random.choice(["planned", "crash", "crash", "split brain"])
        if kind == "planned":  # nothing is lost, so it may be quick
            standby.log = list(was.log)
        else:
            self._real += self._random.randint(OUTAGE, 3 * OUTAGE)
        # Without an archive a standby may take a number that another one has had.
        self._promotions += self._random.random() < 0.9
        standby.timeline = 1 + self._promotions
        self._primary = standby
        if kind == "split brain":
            self._replaced = was
        else:
            self._follow(was)

    def _restart(self, server: Server) -> None:
        used = {each.start for each in self._servers}
        server.start = self._random.choice([start for start in range(1024) if start not in used])

    def _upgrade(self) -> None:
        """Move the data to a new cluster, as dump and restore or `pg_upgrade` do."""
        self._promotions, self._primary.timeline = 0, 1
        self._restart(self._primary)

    def _restore(self) -> None:
        self._real += self._random.randint(OUTAGE, 3 * OUTAGE)
        del self._primary.log[self._random.randint(self._backed_up, len(self._primary.log)) :]
        self._restart(self._primary)

    def _prune(self) -> None:
        """Delete rows that are older than clocks can be off: `Database.prune` asks for an hour."""
        now = self._now(self._primary) + (self._primary.row(None).token >> 10) - 4 * OUTAGE
        for resource in range(_RESOURCES):
            own = self._primary.row(resource).token
            if own > 0 and own >> 10 < now:
                self._primary.log.append((resource, Row(0, -1)))

    def _raise_base(self) -> None:
        """Begin above a token of another authority, as `init(above=…)` does, with a day in between.

        All servers have that before programs go on, and so has the oldest backup: docs ask for it.
        """
        highest = (self._real + self._random.randint(-OUTAGE, 10 * OUTAGE)) << 10
        now, noted = self._now(self._primary), self._primary.row(None).token >> 10
        if (highest >> 10) >= noted + now:
            self._primary.log.append((None, Row(((highest >> 10) - now + 86_400_000) << 10, -1)))
            self._backed_up = len(self._primary.log)
            for each in self._servers:
                each.log = list(self._primary.log)


def broken(mint: Scheme, seeds: int) -> tuple[int, int]:
    """Return in how many histories a token came twice, and in how many one was below a complete one."""
    done = [History(seed, mint) for seed in range(seeds)]
    return sum(each.twice > 0 for each in done), sum(each.below > 0 for each in done)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proof.minting", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=4000, help="how many histories")
    seeds = parser.parse_args().seeds
    schemes = {"time and server": time_and_server, **CONTROLS}
    found = {name: broken(mint, seeds) for name, mint in schemes.items()}
    for name, (twice, below) in found.items():
        print(
            f"{name:16} of {seeds} histories: a token twice in {twice}, one below a complete one in {below}"
        )
    wrong = found.pop("time and server") != (0, 0) or any(sum(each) == 0 for each in found.values())
    print("WRONG" if wrong else "RIGHT: the shipped way never broke, and each control did")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
