"""Time, network and processes: a scheduler that owns all of them, so that a seed replays to the last message.

Nothing here knows the algorithm. Processes run generators that yield requests; those of the protocol are the
shipped ones, answered as `seats.py` answers them: a node that cannot be reached says so at once, answers are
counted until there are enough, and late grants of bids that nobody wants any more are released.

The network is worse than TCP: messages are delayed one by one, so that they overtake each other, and arrive
twice. What it keeps to is that a message reaches only the server process that its connection was opened to; a
restart ends the connection. The protocol relies on that, and on nothing else.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fencelock.authority.redlock.membership import Membership
from fencelock.authority.redlock.protocol import (
    Answer,
    Broadcast,
    Command,
    Fleet,
    Round,
    Said,
    Sleep,
    undoing,
)
from fencelock.authority.redlock.recollection import Recollection
from fencelock.authority.redlock.recovery import Surroundings, recover
from fencelock.authority.redlock.waiting import Line
from fencelock.authority.redlock.wire.connection import PendingBroadcast
from fencelock.authority.redlock.wire.nodes import MAKES_LOCKS
from fencelock.errors import FencelockError
from tests.simulation.node import BLANK, Disk, ModelNode
from tests.simulation.weather import Weather

NODE_KEY = "{fencelock}"
PATIENCE = 0.3
CONNECTING = 0.005
#: Seconds after which the database ends a transaction whose client has gone quiet.
IDLE = 2.0
_NEVER = -1
_UNREACHABLE = Answer(Said.UNREACHABLE, detail="there is no connection")
_GRANTED = Said.GRANTED
_FORGETFUL = frozenset({Said.AMNESIA, Said.RESTARTED})
_ADMITTING = frozenset({Said.ADMITTED, Said.OPENED})

Program = Generator[Any, Any, Any]
membership_of = lru_cache(maxsize=None)(Membership.from_json)


class Connection(Exception):  # noqa: N818 - what a program is told of a statement whose answer never came
    """The connection to the database was lost; nobody knows what became of the statement."""


class Ask:
    """Request of a client's program: have the storage execute a statement, and return its answer.

    Args:
        what: for the trace.
        execute: does it, and calls what it is given with the answer.
    """

    __slots__ = ("execute", "what")

    def __init__(self, what: str, execute: Callable[[Callable[[Any], None]], None]) -> None:
        self.what = what
        self.execute = execute


class Clock:
    """A clock that goes at a rate of its own, and jumps when it is told to."""

    __slots__ = ("_offset", "rate")

    def __init__(self, rate: float, offset: float) -> None:
        self.rate = rate
        self._offset = offset

    def read(self, now: float) -> float:
        """Return what it says at a moment."""
        return now * self.rate + self._offset

    def jump(self, seconds: float) -> None:
        """Go wrong by so many seconds."""
        self._offset += seconds

    def drift(self, now: float, rate: float) -> None:
        """Go at another rate from now on."""
        self._offset += now * (self.rate - rate)
        self.rate = rate


class Server:
    """A node's machine: the node, its clock, what is on its disk, and whether it runs."""

    __slots__ = ("clock", "disk", "down", "frozen_until", "node", "number")

    def __init__(self, number: int, node: ModelNode, clock: Clock) -> None:
        self.number = number
        self.node = node
        self.clock = clock
        self.disk: Disk = BLANK
        self.down = False
        self.frozen_until = 0.0

    def look(self, now: float) -> ModelNode:
        """Return the node, with its clock set."""
        self.node.now = self.clock.read(now) * 1000
        return self.node


class Task:
    """One generator of a process, at a request."""

    __slots__ = (
        "ballot",
        "began",
        "name",
        "place",
        "process",
        "program",
        "result",
        "sleeping",
        "then",
        "wakeable",
    )

    def __init__(
        self, process: Process, name: str, program: Program, then: Callable[[Any], None] | None = None
    ) -> None:
        self.process = process
        self.name = name
        self.program = program
        self.then = then
        self.ballot: PendingBroadcast | None = None
        self.began = 0.0
        #: Counts sleeps and statements: whatever belongs to an earlier one comes too late.
        self.sleeping = 0
        #: Where it stands in line, and whether it sleeps so that a call may wake it.
        self.place = ""
        self.wakeable = False
        self.result: Any = None


class Message(NamedTuple):
    """A command on its way to a server process, and who waits for the answer."""

    task: Task
    ballot: PendingBroadcast
    seat: int
    server: Server
    run: int
    command: Command


class Process:
    """A process that speaks to some servers: a client or an operator.

    Attributes:
        name: unlike that of any other, also of those that come after it.
        seats: numbers of the servers that it is configured with, in its order.
        wanted: nonces of bids whose grants must not be released.
        line: its places in the nodes' queues.
    """

    def __init__(self, world: World, name: str, seats: Sequence[int], clock: Clock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.alive = True
        self.frozen_until = 0.0
        self.wanted: set[str] = set()
        self.recovers = True
        self._recovering = False
        self._failures = 0
        self._not_before = 0.0
        self._epoch: int | None = None
        self.configure(seats)

    def configure(self, seats: Sequence[int]) -> None:
        """Use other servers."""
        self.seats = tuple(seats)
        self.names = tuple(f"redis://n{number}:6379" for number in seats)
        self.runs = [_NEVER] * len(seats)
        self.dialling = [False] * len(seats)
        #: RELEASEs that could not be sent, by nonce.
        self.owed: list[dict[str, Command]] = [{} for _ in seats]
        self._recollection = Recollection(self.names)
        self._fleet: Fleet | None = None
        self.line = Line(self.name, len(seats), self.world.random.random)
        for index in range(len(seats)):
            self.world.dial(self, index)

    @property
    def now(self) -> float:
        """What its clock says."""
        return self.clock.read(self.world.now)

    def see(self) -> Fleet:
        """Return the fleet as it is known now, as `Redlock` does."""
        if self._fleet is None:
            known = self._recollection.membership()
            self._fleet = Fleet(
                names=self.names,
                node_key=NODE_KEY,
                fingerprint=known.fingerprint if known is not None else "",
                order=self._recollection.order(),
                max_ttl=known.max_ttl if known is not None else 300.0,
                patience=PATIENCE,
            )
        return self._fleet

    def meet(self, index: int, node_id: str, members: str) -> None:
        """Note who answers for a node."""
        if self._recollection.note(index, node_id, membership_of(members) if members else None):
            self._fleet = None

    def hear_of_trouble(self) -> None:
        """Start a recovery, unless one is at work or the last was in vain a moment ago."""
        if self.recovers and not self._recovering and self.now >= self._not_before:
            self._recovering = True
            program = recover(self.around())
            self.world.start(Task(self, "recovery", program, self._recovered))

    def around(self) -> Surroundings:
        """Return what a recoverer of this process knows."""
        return Surroundings(self.names, NODE_KEY, PATIENCE, self.world.new_word, self.world.random.random)

    def _recovered(self, result: Any) -> None:
        self._recovering = False
        self._failures = 0 if result is True else self._failures + 1
        self._not_before = self.now + min(5.0, 0.1 * 2**self._failures)

    def note(self, index: int, answer: Answer) -> None:
        """Take notice of what an answer says about its node."""
        if answer.said is _GRANTED:
            if answer.epoch != self._epoch:
                if self._epoch is not None:
                    self.hear_of_trouble()
                self._epoch = answer.epoch
        elif answer.said in _FORGETFUL:
            self.hear_of_trouble()
        elif answer.said in _ADMITTING:
            self.meet(index, *answer.facts[:2])


class World:
    """Everything there is, and the order in which it happens.

    Args:
        rng: the only source of randomness.
        weather: how the network is.
        count: how many servers there are.
        node_class: the node, or a mutant.
        trace: gets a line for everything that happens; None for none.
    """

    def __init__(
        self,
        rng: random.Random,
        weather: Weather,
        count: int,
        node_class: type[ModelNode] = ModelNode,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.random = rng
        self.weather = weather
        self.now = 0.0
        self.faults: dict[str, int] = {}
        self.trace = trace
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._words = 0
        self.processes: dict[str, Process] = {}
        #: Who sleeps in line, by place; and which processes cannot reach which servers.
        self.in_line: dict[str, Task] = {}
        self.cut: set[tuple[str, int]] = set()
        self.late, self.lost, self.doubled = weather.late, weather.lost, weather.doubled
        self.cutting = 0.01 * weather.rates["database cut"]
        self.servers = [Server(number, node_class(f"n{number}"), self.new_clock()) for number in range(count)]
        for server in self.servers:
            server.node.publish = self._publisher(server)

    # Time.

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have something happen at a moment."""
        self.events += 1
        heapq.heappush(self._heap, (when, self.events, action, arguments))

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> None:
        """Let things happen until a moment, or until that is enough."""
        heap = self._heap
        pop = heapq.heappop
        while heap and heap[0][0] <= until:
            if enough is not None and enough():
                return
            self.now, _, action, arguments = pop(heap)
            action(*arguments)
        if enough is None or not enough():
            self.now = max(self.now, until)

    def new_clock(self) -> Clock:
        """Return a clock that is about right, or anyhow."""
        if self.weather.sane_clocks:
            from_true = 0.003 * (2 * self.random.random() - 1)
            return Clock(1 + from_true, 0.05 * self.random.random())
        return Clock(self.random.uniform(0.8, 1.25), 100 * self.random.random())

    def new_word(self) -> str:
        """Return a word that is used once."""
        self._words += 1
        return f"w{self._words}"

    def tell(self, who: str, what: str) -> None:
        """Write a line of the trace. Only to be called where there is one: lines cost more than the rest."""
        if self.trace is not None:
            self.trace(f"{self.now:12.6f}  {who:<4}  {what}")

    def count_fault(self, kind: str) -> None:
        """Note that something went wrong."""
        self.faults[kind] = self.faults.get(kind, 0) + 1

    # Processes.

    def add(self, process: Process) -> None:
        """Let a process take part."""
        self.processes[process.name] = process

    def kill(self, process: Process) -> None:
        """End a process at once: nothing of it is heard of again."""
        process.alive = False
        self.processes.pop(process.name, None)

    def start(self, task: Task) -> None:
        """Run a generator in its process."""
        self._go_on(task, None)

    def _go_on(self, task: Task, value: Any, error: Exception | None = None) -> None:
        """Resume a generator, and carry out what it asks for next."""
        process = task.process
        if not process.alive:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._go_on, task, value, error)
            return
        task.ballot = None
        while (request := self._resume(task, value, error)) is not None:
            if type(request) is not Broadcast:
                self._wait(task, request)
                return
            value, error = self._broadcast(task, request), None
            if value is None:
                return

    def _resume(self, task: Task, value: Any, error: Exception | None) -> Any:
        """Return what a generator asks for next; None where it has ended."""
        try:
            return task.program.send(value) if error is None else task.program.throw(error)
        except StopIteration as stop:
            task.result = stop.value
        except FencelockError as failure:
            task.result = failure
        if self.trace is not None:
            self.tell(task.process.name, f"{task.name} ended: {_short(task.result)}")
        if task.then is not None:
            task.then(task.result)
        return None

    def _wait(self, task: Task, request: Sleep | Ask) -> None:
        task.sleeping += 1
        if isinstance(request, Sleep):
            self.at(self.now + request.seconds / task.process.clock.rate, self._wake, task, task.sleeping)
            task.wakeable = request.wakeable and task.place != ""
            if task.wakeable:
                self._look_at_line(task)
        else:
            self._ask(task, request)

    def _wake(self, task: Task, sleep: int) -> None:
        if task.sleeping == sleep:
            task.sleeping += 1
            task.wakeable = False
            self._go_on(task, task.process.now)

    def _look_at_line(self, task: Task) -> None:
        process = task.process
        due = process.line.due(task.place)
        if due < float("inf"):
            # A little later: what is too short for a float would not pass.
            left = max(0.0, due - process.now) / process.clock.rate + 1e-6
            self.at(self.now + left, self._wake, task, task.sleeping)

    # Messages to nodes, and their answers.

    def delay(self) -> float | None:
        """Return how long a message takes; None for ever."""
        chance = self.random.random
        dice = chance()
        if dice < self.lost:
            self.count_fault("message lost")
            return None
        if dice > 1 - self.late:
            self.count_fault("message late")
            return self.weather.lateness * -math.log(1 - chance())
        return self.weather.latency * (0.5 + chance())

    def _broadcast(self, task: Task, request: Broadcast) -> Round | None:
        process = task.process
        began = process.now
        ballot = PendingBroadcast(request)
        for index in request.nodes:
            server = self.servers[process.seats[index]]
            run = process.runs[index]
            if run != server.node.run or server.down or (self.cut and self._is_cut(process, index)):
                ballot.add_reply(index, _UNREACHABLE)
                if request.command.script == "release":
                    process.owed[index][request.command.nonce] = request.command
                self.dial(process, index)
            else:
                self._send(Message(task, ballot, index, server, run, request.command))
        if ballot.complete or request.patience <= 0:
            return Round(began, began, ballot.close())
        task.ballot = ballot
        task.began = began
        self.at(self.now + request.patience / process.clock.rate, self._give_up, task, ballot)
        return None

    def _is_cut(self, process: Process, index: int) -> bool:
        return (process.name, process.seats[index]) in self.cut

    def _send(self, message: Message) -> None:
        delay = self.delay()
        if delay is not None:
            self.at(self.now + delay, self._deliver, message)
        else:
            self._lose(message)
        if self.doubled and self.random.random() < self.doubled:
            self.count_fault("message doubled")
            again = self.random.expovariate(1.0) * 10 * self.weather.lateness
            self.at(self.now + again, self._deliver, message)

    def _deliver(self, message: Message) -> None:
        task, ballot, _, server, run, command = message
        node = server.node
        if node.run != run or server.down:
            return
        if server.frozen_until > self.now:
            self.at(server.frozen_until, self._deliver, message)
            return
        node.now = server.clock.read(self.now) * 1000
        answer = node.execute(command)
        if self.trace is not None:
            self.tell(node.name, f"{task.process.name} {_spoken(command)} → {_heard(answer)}")
        if ballot.over and not undoing(command, answer):
            return  # nobody would do anything with it
        delay = self.delay()
        if delay is not None:
            self.at(self.now + delay, self._arrive, message, answer)
        else:
            self._lose(message)

    def _arrive(self, message: Message, answer: Answer) -> None:
        task, ballot, index, _, run, command = message
        process = task.process
        if not process.alive or index >= len(process.runs) or process.runs[index] != run:
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._arrive, message, answer)
            return
        process.note(index, answer)
        if ballot.over:
            if answer.said in MAKES_LOCKS:
                self._undo(process, index, command, answer)
            return
        if index in ballot.answers:
            return
        ballot.add_reply(index, answer)
        if ballot.complete:
            self._count(task, ballot)

    def _lose(self, message: Message) -> None:
        """A connection broke: over the next one, the process undoes what may have been done on the last."""
        self.at(self.now + CONNECTING * (0.5 + self.random.random()), self._make_up, message)

    def _make_up(self, message: Message) -> None:
        process = message.task.process
        if not process.alive or message.seat >= len(process.seats):
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._make_up, message)
        elif self.servers[process.seats[message.seat]] is message.server:
            self._undo(process, message.seat, message.command, None)

    def _give_up(self, task: Task, ballot: PendingBroadcast) -> None:
        if task.ballot is ballot and not ballot.over:
            if task.process.frozen_until > self.now:  # what has arrived meanwhile is read first
                self.at(task.process.frozen_until, self._give_up, task, ballot)
            else:
                self._count(task, ballot)

    def _count(self, task: Task, ballot: PendingBroadcast) -> None:
        self._go_on(task, Round(task.began, task.process.now, ballot.close()))

    def _undo(self, process: Process, index: int, command: Command, answer: Answer | None) -> None:
        """Release what is locked for nobody, as a late answer shows or one that will never come."""
        for undo in undoing(command, answer):
            if undo.nonce not in process.wanted:
                request = Broadcast(undo, [index], lambda _: True, 0.0)
                self._broadcast(Task(process, "undo", _nothing()), request)

    def dial(self, process: Process, index: int) -> None:
        """Begin to open a connection, unless that is going on."""
        if not process.dialling[index]:
            process.dialling[index] = True
            when = self.now + CONNECTING * (0.5 + self.random.random())
            self.at(when, self._connect, process, index, process.seats)

    def _connect(self, process: Process, index: int, seats: tuple[int, ...]) -> None:
        if not process.alive or process.seats is not seats:
            return
        process.dialling[index] = False
        server = self.servers[process.seats[index]]
        busy = max(server.frozen_until, process.frozen_until)
        if server.down or self._is_cut(process, index) or busy > self.now:
            process.line.go_deaf(index)
            return
        node = server.node
        process.runs[index] = node.run
        process.line.listen(index)
        process.meet(index, node.hash.get("id", ""), node.hash.get("members", ""))
        owed, process.owed[index] = process.owed[index], {}
        for release in owed.values():
            self._undo(process, index, release, None)

    def _publisher(self, server: Server) -> Callable[[str, str], bool]:
        def publish(client: str, message: str) -> bool:
            process = self.processes.get(client)
            if process is None or server.number not in process.seats:
                return False
            index = process.seats.index(server.number)
            if process.runs[index] != server.node.run:
                return False
            delay = self.delay()
            if delay is not None:
                self.at(self.now + delay, self._call, process, index, message)
            return True

        return publish

    def _call(self, process: Process, index: int, message: str) -> None:
        if not process.alive or index >= len(process.seats):
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._call, process, index, message)
            return
        place = process.line.note(index, message.encode(), process.now)
        if place:
            if self.trace is not None:
                self.tell(
                    process.name, f"hears n{process.seats[index]} call {place}{message.partition(' ')[1]}"
                )
            task = self.in_line.get(place)
            if task is not None and task.wakeable:
                self._look_at_line(task)

    # Statements for the storage.

    def _ask(self, task: Task, ask: Ask) -> None:
        """Send a statement; its connection may break, and it may arrive all the same, at once or late."""
        number = task.sleeping
        if self.cutting and self.random.random() < self.cutting:
            self.count_fault("database connection lost")
            self.at(self.now + self.weather.latency, self._break, task, number)
            if self.random.random() < 0.5:
                self.at(self.now + 0.1 * self.random.expovariate(1.0), self._execute, task, ask, _NEVER)
        else:
            self.at(self.now + self.weather.latency * self.random.random(), self._execute, task, ask, number)
            self.at(self.now + IDLE, self._break, task, number)

    def _execute(self, task: Task, ask: Ask, number: int) -> None:
        def reply(answer: Any) -> None:
            if self.trace is not None:
                self.tell("db", f"{task.process.name} {ask.what} → {answer}")
            self.at(
                self.now + self.weather.latency * self.random.random(), self._answer, task, number, answer
            )

        ask.execute(reply)

    def _answer(self, task: Task, number: int, answer: Any) -> None:
        if task.sleeping == number:
            task.sleeping += 1
            self._go_on(task, answer)

    def _break(self, task: Task, number: int) -> None:
        if task.sleeping == number:
            task.sleeping += 1
            self._go_on(task, None, Connection())


def _nothing() -> Program:
    yield from ()


def _spoken(command: Command) -> str:
    """Return a command as a trace has it."""
    keys = ",".join(key.rpartition(":")[2] for key in command.keys[1:])
    words = " ".join(str(argument) for argument in command.arguments[2 if command.nonce else 1 :])
    return " ".join(filter(None, (command.script.upper(), keys, command.nonce, words[:100])))


def _heard(answer: Answer) -> str:
    """Return an answer as a trace has it."""
    counters = ",".join(map(str, answer.counters))
    facts = " ".join(fact for fact in answer.facts if not fact.startswith("{"))
    return " ".join(filter(None, (answer.said.name, f"{answer.epoch}:{counters}" if counters else "", facts)))


def _short(result: Any) -> str:
    """Return what a task came to as a trace has it."""
    return f"{type(result).__name__}: {result}"[:160] if isinstance(result, Exception) else str(result)[:160]
