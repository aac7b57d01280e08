"""A world by a seed: requests that are lost or late, clocks that differ, pauses, crashes and restores."""

from __future__ import annotations

import copy
import heapq
import itertools
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from .judge import STUCK, Held, Judge
from .rules import OLD, OUTAGE, Rules
from .store import PATIENCE, GoneError, LostError, State, Store

_Result = TypeVar("_Result")
#: A client's steps: it sleeps for milliseconds, or sends a request to the store.
Step = float | tuple[Callable[..., Any], tuple[Any, ...]]
Steps = Generator[Step, Any, _Result]
_EPOCH: Final = 1 << 40
_DAY: Final = 86_400_000
#: Milliseconds of trouble, and those within which all have to be served once it is over.
_TROUBLE, _CALM = 12_000, 90_000


def validity(ttl: float) -> float:
    """As `fencelock.lease` has it."""
    return ttl - (ttl / 100 + 2)


class Client:
    """A process: its clocks, and what it does; a subclass has the steps on its store."""

    def __init__(self, world: World) -> None:
        self.world, self.store, self.rules = world, world.store, world.rules
        self.random = world.random
        self.offset = self.random.randint(-world.skew, world.skew)
        self._rate = self.random.uniform(0.996, 1.004)
        self.paused = self.arrived = 0.0
        self.turn = 0
        self.done = False
        self.steps: Steps[None] = self.live()
        self.begin()

    def number(self) -> int:
        return self.random.getrandbits(63)

    def clock(self) -> int:
        return _EPOCH + int(self.world.now) + self.offset

    def mono(self) -> float:
        return self.world.now * self._rate

    def begin(self) -> None:
        """Set what a process knows at its start."""
        raise NotImplementedError

    def acquire(self, held: Held, end: float) -> Steps[bool]:
        raise NotImplementedError

    def extend(self, held: Held) -> Steps[bool]:
        raise NotImplementedError

    def remint(self, held: Held) -> Steps[bool]:
        raise NotImplementedError

    def keep(self, held: Held, until: int) -> Steps[bool]:
        raise NotImplementedError

    def release(self, held: Held) -> Steps[None]:
        raise NotImplementedError

    def valid(self, held: Held) -> float:
        raise NotImplementedError

    def new(self, resources: list[int]) -> Held:
        raise NotImplementedError

    def prune(self, resource: int) -> Steps[None]:
        raise NotImplementedError

    def force(self, resource: int) -> Steps[None]:
        yield self.store.force, (resource,)

    def is_old(self, mark: int, base: int) -> bool:
        return 0 < mark >> 10 < base + self.clock() - OLD

    def raise_base(self) -> Steps[None]:
        """Begin above a token of another authority, as `init(above=…)` does."""
        above = (self.clock() + self.random.randint(-OUTAGE, 10 * OUTAGE)) << 10
        base = yield self.store.base, ()
        value = max(base.value, (above >> 10) - self.clock() + _DAY)
        yield self.store.set_base, (base, value, above)

    def take(self, held: Held, tokens: dict[int, int]) -> bool:
        """Hold what was minted, if that is valid still."""
        if self.valid(held) <= self.mono():
            return False
        held.until = self.valid(held) / self._rate
        self.world.judge.handed(held, tokens, self.world.now)
        return True

    def prolong(self, held: Held) -> None:
        if held.until > self.world.now:
            held.until = max(held.until, self.valid(held) / self._rate)
            self.world.judge.believes(held, self.world.now)

    def live(self) -> Steps[None]:
        while True:
            last = self.world.calm
            yield self.random.uniform(1, 150 if self.world.calm else self.world.weather.idle)
            yield from self._use()
            if last:
                return

    def _use(self) -> Steps[None]:
        count = min(self.random.choice([1, 1, 2, 2, 3]), self.world.weather.resources)
        held = self.new(sorted(self.random.sample(range(self.world.weather.resources), count)))
        self.world.judge.began(held, self.world.now)
        patience = self.random.choice([0, 500, 5000, 5000])
        if not (yield from self.acquire(held, self.mono() + patience)):
            return
        kept = False
        while held.until > self.world.now and self.random.random() < (
            0.5 if self.world.calm else self.world.weather.holds
        ):
            try:
                yield self.random.uniform(1, 200)
                act = self.random.random()
                if act < 0.4:
                    if not (yield from self.extend(held)):
                        break
                elif act < 0.6:
                    yield from self.remint(held)
                elif act < 0.65:
                    kept = True
                    break
            except LostError:
                pass
            except GoneError:
                break
        yield from self._leave(held, kept=kept)

    def _leave(self, held: Held, *, kept: bool) -> Steps[None]:
        held.until = 0.0
        if kept:
            until = self.clock() + self.random.randint(500, 6500)
            try:
                if (yield from self.keep(held, until)):
                    self.world.judge.kept(held, until - _EPOCH - self.offset)
                    return
            except (LostError, GoneError):
                return
        yield from self.release(held)


class Operator(Client):
    """Mixed into a client: prunes, forces releases and raises the base."""

    def live(self) -> Steps[None]:
        while not self.world.calm:
            yield self.random.uniform(50, 600)
            resource = self.random.randrange(self.world.weather.resources)
            act = self.random.choices(
                ["prune", "force", "raise"], [6, self.world.weather.forces, self.world.weather.raises]
            )[0]
            try:
                if act == "prune":
                    yield from self.prune(resource)
                elif act == "force":
                    yield from self.force(resource)
                else:
                    yield from self.raise_base()
            except (LostError, GoneError):
                pass


@dataclass(frozen=True, slots=True)
class Weather:
    """How rough it is, and what clients do; each history has its own.

    Attributes:
        crew: how many clients there are.
        idle: milliseconds between two acquisitions at most.
        holds: the chance to go on holding, at each step.
        moves: the chance that an extension asks for a longer lease.
        rough: the chance that something becomes of a request.
        pauses: weighs pauses of clients.
        forces: weighs forced releases.
        raises: weighs raised bases.
        restores: weighs restores from a snapshot.
    """

    resources: int
    crew: int
    idle: int
    holds: float
    moves: float
    rough: float
    pauses: float
    forces: float
    raises: float
    restores: float

    @classmethod
    def by(cls, chance: random.Random) -> Weather:
        return cls(
            resources=chance.choice([1, 2, 3]),
            crew=chance.choice([2, 3, 4]),
            idle=chance.choice([50, 150, 150, 3000]),
            holds=chance.choice([0.5, 0.8, 0.97]),
            moves=chance.choice([0, 0.2, 0.8]),
            rough=chance.choice([0.02, 0.1, 0.25, 0.5]),
            pauses=chance.choice([0, 2, 6]),
            forces=chance.choice([0.3, 2, 10]),
            raises=chance.choice([0.2, 1]),
            restores=chance.choice([0, 1, 5]),
        )


class World:
    """One history."""

    def __init__(
        self,
        seed: int,
        store: Store,
        rules: Rules,
        *,
        fifo: bool = False,
        skew: int = OUTAGE // 2 - 1,
        loses_base: bool = False,
        **weather: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.store, self.rules, self.skew = store, rules, skew
        self.judge = Judge()
        self.now = 0.0
        self.calm = False
        self.fifo = fifo
        self._loses_base = loses_base
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._snapshots = [State()]
        self._clients: list[Client] = []
        self.weather = replace(Weather.by(self.random), **weather)

    def play(self, client: type[Client], operator: type[Client]) -> Judge:
        self._clients = [client(self) for _ in range(self.weather.crew)] + [operator(self)]
        for each in self._clients:
            self._resume(each, each.turn, None)
        self.at(0, self._disturb)
        self._run(_TROUBLE)
        self.calm = True
        for each in self._clients:
            each.paused = 0.0
        self._run(_TROUBLE + _CALM)
        self.judge.broken[STUCK] += sum(not each.done for each in self._clients)
        return self.judge

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._count), event))

    def _run(self, end: float) -> None:
        while self._events and self._events[0][0] < end:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _resume(self, client: Client, turn: int, value: Any) -> None:
        if client.turn != turn:
            return
        if client.paused > self.now:
            self.at(client.paused - self.now, lambda: self._resume(client, turn, value))
            return
        client.turn += 1
        try:
            failed = isinstance(value, Exception)
            step = client.steps.throw(value) if failed else client.steps.send(value)
        except StopIteration:
            client.done = True
            return
        self._take(client, step)

    def _take(self, client: Client, step: Step) -> None:
        turn = client.turn
        if not isinstance(step, tuple):
            self.at(step, lambda: self._resume(client, turn, None))
            return
        delay = self.random.uniform(0.5, 8)
        answered = sent = True
        if not self.calm:
            if self.random.random() < 0.02:  # it is paused with a request in its hands
                client.paused = self.now + self.random.choice([200, 1500, 5000])
                delay += client.paused - self.now
            if self.random.random() < self.weather.rough:
                fault = self.random.choice(["late", "late", "not sent", "not answered"])
                delay += self.random.choice([20, 150, 400, 1000, 2500]) if fault == "late" else 0
                sent, answered = fault != "not sent", fault != "not answered"
        if self.fifo:
            delay = max(delay, client.arrived - self.now)
            client.arrived = self.now + delay
        if sent:
            self.at(delay, lambda: self._arrive(client, turn, step, answered=answered))
        self.at(PATIENCE, lambda: self._resume(client, turn, LostError()))

    def _arrive(self, client: Client, turn: int, step: Step, *, answered: bool) -> None:
        if self.store.down:
            return
        assert isinstance(step, tuple)
        value = self.call(*step)
        if answered:
            self.at(self.random.uniform(0.5, 8), lambda: self._resume(client, turn, value))

    def call(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Let the store serve a request; return its answer, which may be an error."""
        self.store.tick(self.now)
        try:
            value = method(*arguments)
        except (GoneError, LostError) as error:
            value = error
        if self.store.minted:
            for mint in self.store.minted:
                self.judge.minted(mint, self.now)
            self.store.minted.clear()
        for who in self.store.taken:
            self.judge.taken(who)
        self.store.taken.clear()
        self.judge.above = self.store.above
        return value

    def _disturb(self) -> None:
        if self.calm:
            return
        self.at(self.random.uniform(50, 400), self._disturb)
        client = self.random.choice(self._clients)
        match self.random.choices(
            ["pause", "crash", "clock", "snapshot", "restore"],
            [self.weather.pauses, 2, 6, 3, self.weather.restores],
        )[0]:
            case "pause":
                client.paused = self.now + self.random.choice([300, 1500, 6000])
            case "crash":
                client.steps.close()
                client.done = True
                client.turn += 1
                self._clients.remove(client)
                self._clients.append(again := type(client)(self))
                self._resume(again, again.turn, None)
            case "clock":
                step = client.offset + self.random.randint(-5, 5)
                client.offset = max(-self.skew, min(self.skew, step))
            case "snapshot":
                self.store.tick(self.now)
                self._snapshots.append(copy.deepcopy(self.store.state))
            case "restore" if not self.store.down:
                self.store.down = True
                self.at(self.random.randint(OUTAGE, 3 * OUTAGE), self._restore)

    def _restore(self) -> None:
        self.store.tick(self.now)
        base = self.store.state.base.mark
        self.store.restore(copy.deepcopy(self.random.choice(self._snapshots[-4:] + self._snapshots[:1])))
        if base and not self._loses_base:  # as docs ask for it: before programs go on
            self.store.state.base.mark = base + self.random.choice([0, 0, 1000, _DAY])
            self.store.state.base.version = max(1, self.store.state.base.version)
        self.store.down = False
        self.judge.restored()
