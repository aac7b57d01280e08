"""Time, network and processes: a scheduler that owns all of them, so that a seed replays to the last message.

Nothing here knows the algorithm. Processes run generators that yield requests; those of the protocol are the
shipped ones, and so are the connections: they know which node may be asked, which messages are owed, and what
becomes of late answers.

The network is worse than TCP: messages are delayed one by one, so that they overtake each other, and arrive
twice. It keeps one rule: a message reaches only the server process that its connection was opened to. A
restart ends the connection, and so does a message that is lost. The protocol relies on nothing else.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache, partial
from typing import Any

from fencelock.authority.redlock.membership.members import Identity, Membership, MembershipView
from fencelock.authority.redlock.membership.recover import recover
from fencelock.authority.redlock.membership.reports import NodeGroup
from fencelock.authority.redlock.protocol.messages import (
    SUBSCRIBE,
    Broadcast,
    Command,
    Replies,
    Reply,
    ReplyKind,
    Sleep,
)
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.wire.codec import Packed
from fencelock.authority.redlock.wire.connection import Connection, PendingBroadcast, PendingReply
from fencelock.authority.redlock.wire.nodes import NodeConnections
from fencelock.errors import FencelockError
from proof.simulation.node import BLANK, Disk, ModelNode
from proof.simulation.weather import Weather

NODE_KEY = "{fencelock}"
PATIENCE = 0.3
CONNECTING = 0.005
#: Seconds after which the database ends a transaction whose client has gone quiet.
IDLE = 2.0
_NEVER = -1
_BROKEN = Reply(ReplyKind.UNREACHABLE, detail="the connection broke")
_SUBSCRIBED = Reply(ReplyKind.SUBSCRIBED)

Program = Generator[Any, Any, Any]
membership_of = lru_cache(maxsize=None)(Membership.from_json)


class ConnectionLost(Exception):  # noqa: N818 - what a program is told of a statement whose answer never came
    """The connection to the database was lost, so the outcome of the statement is unknown."""


class Ask:
    """Request of a client's program: have the storage execute a statement, and return its answer."""

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
        return now * self.rate + self._offset

    def jump(self, seconds: float) -> None:
        self._offset += seconds

    def drift(self, now: float, rate: float) -> None:
        self._offset += now * (self.rate - rate)
        self.rate = rate


class Server:
    """A node's machine: the node, its clock, its disk, and whether it runs."""

    __slots__ = ("clock", "disk", "down", "frozen_until", "node", "number")

    def __init__(self, number: int, node: ModelNode, clock: Clock) -> None:
        self.number = number
        self.node = node
        self.clock = clock
        self.disk: Disk = BLANK
        self.down = False
        self.frozen_until = 0.0

    def look(self, now: float) -> ModelNode:
        self.node.now = self.clock.read(now) * 1000
        return self.node


class Task:
    __slots__ = ("ballot", "began", "name", "place", "process", "program", "result", "sleeping", "then")

    def __init__(
        self, process: Process, name: str, program: Program, then: Callable[[Any], None] | None = None
    ) -> None:
        self.process = process
        self.name = name
        self.program = program
        self.then = then
        self.ballot: Ballot | None = None
        self.began = 0.0
        #: Counts sleeps and statements: whatever belongs to an earlier one comes too late.
        self.sleeping = 0
        #: Under which a call may end its sleep.
        self.place = ""
        self.result: Any = None


class Ballot(PendingBroadcast):
    __slots__ = ("_task",)

    def __init__(self, request: Broadcast, task: Task) -> None:
        super().__init__(request)
        self._task = task

    def wake(self) -> None:
        world = self._task.process.world
        world.at(world.now, world.count, self._task, self)


class Link(Connection):
    """A connection whose commands travel one by one, and not as bytes."""

    __slots__ = ("free_at", "index", "is_subscribed", "process", "run", "server")

    def __init__(
        self, process: Process, index: int, identity: Identity, epoch: int | None, *, pushes: bool
    ) -> None:
        super().__init__(index, identity, epoch, pushes=pushes)
        self.process = process
        self.index = index
        self.server = process.world.servers[process.seats[index]]
        self.run = self.server.node.run
        self.is_subscribed = False
        self.free_at = 0.0

    def put_alone(self, pending: PendingReply, packed: Packed) -> None:
        super().put_alone(pending, packed)
        self.outgoing.clear()
        self.process.world.send(self, pending)

    def received(self, data: Any, now: float) -> list[tuple[PendingReply, Reply]]:  # noqa: ARG002
        if isinstance(data, bytes):
            self.published.append(data)
            return []
        pending, answer = data
        if pending in self.unanswered:
            self.unanswered.remove(pending)
        else:  # it has come twice
            pending = pending._replace(broadcast=None)
        return [(pending, answer)] if self.answered(pending, answer) else []


class Process:
    """A process that speaks to some servers: a client or an operator."""

    def __init__(self, world: World, name: str, seats: Sequence[int], clock: Clock) -> None:
        self.world = world
        self.name = name
        self.clock = clock
        self.alive = True
        self.frozen_until = 0.0
        self.recovers = True
        self._recovering = False
        self._failures = 0
        self._not_before = 0.0
        self.configure(seats)

    def configure(self, seats: Sequence[int]) -> None:
        self.seats = tuple(seats)
        self.names = tuple(f"redis://n{number}:6379" for number in seats)
        self._connecting: set[int] = set()
        view = MembershipView(self.names, NODE_KEY, PATIENCE)
        self.current = view.current
        self.line = WaitQueue(self.name, len(seats), self.world.random.random)
        self.nodes = NodeConnections(
            self.names,
            self,
            self.line,
            self.name,
            on_identity=view.on_identity,
            on_trouble=self.hear_of_trouble,
            connect_timeout=PATIENCE,
            # Some ask on a node that has owed an answer for long: then more is under way at the same time.
            patience=PATIENCE if self.world.random.random() < 0.5 else IDLE,
            jitter=self.world.random.random,
            new_connection=partial(Link, self),
        )
        self.nodes.listen(self.now)
        self.nodes.open_absent(self.now)

    @property
    def now(self) -> float:
        return self.clock.read(self.world.now)

    def hear_of_trouble(self) -> None:
        if self.recovers and not self._recovering and self.now >= self._not_before:
            self._recovering = True
            program = recover(self.group())
            self.world.start(Task(self, "recovery", program, self._recovered))

    def group(self) -> NodeGroup:
        return NodeGroup(self.names, NODE_KEY, PATIENCE, self.world.new_word, self.world.random.random)

    def _recovered(self, result: Any) -> None:
        self._recovering = False
        self._failures = 0 if result is True else self._failures + 1
        self._not_before = self.now + min(5.0, 0.1 * 2**self._failures)

    # What its connections ask for.

    def connect(self, node: int) -> None:
        if node not in self._connecting:
            self._connecting.add(node)
            world = self.world
            when = world.now + CONNECTING * (0.5 + world.random.random())
            world.at(when, self._connected, node, self.seats)

    def is_connecting(self, node: int) -> bool:
        return node in self._connecting

    def disconnect(self, node: int) -> None:
        """Do nothing: there is no socket."""

    def _connected(self, index: int, seats: tuple[int, ...]) -> None:
        if not self.alive or self.seats is not seats:
            return
        self._connecting.discard(index)
        world = self.world
        server = world.servers[seats[index]]
        if (
            server.down
            or world.is_cut(self, server)
            or max(server.frozen_until, self.frozen_until) > world.now
        ):
            self.nodes.failed(index, _BROKEN, self.now)
            self.open_again()
            return
        node = server.node
        members = node.hash.get("members", "")
        membership = membership_of(members) if members else None
        identity = Identity(f"{node.name}.{node.run}", "", node.hash.get("id", ""), membership)
        self.nodes.connected(index, identity, self.now, pushes=True)

    def open_again(self) -> None:
        if self.alive and (again := self.nodes.open_absent(self.now)) < math.inf:
            self.world.at(self.world.now + (again - self.now) / self.clock.rate + 1e-6, self.open_again)


class World:
    """Everything there is, and the order in which it happens."""

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
        #: The tasks that sleep in line, by place; and which processes cannot reach which servers.
        self.in_line: dict[str, Task] = {}
        self.cut: set[tuple[str, int]] = set()
        self.late, self.lost, self.doubled = weather.late, weather.lost, weather.doubled
        self.cutting = 0.01 * weather.rates["database cut"]
        self.servers = [Server(number, node_class(f"n{number}"), self.new_clock()) for number in range(count)]
        for server in self.servers:
            server.node.publish = self._publisher(server)

    # Time.

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self.events += 1
        heapq.heappush(self._heap, (when, self.events, action, arguments))

    def run(self, until: float, enough: Callable[[], bool] | None = None) -> None:
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
        if self.weather.sane_clocks:
            from_true = 0.003 * (2 * self.random.random() - 1)
            return Clock(1 + from_true, 0.05 * self.random.random())
        return Clock(self.random.uniform(0.8, 1.25), 100 * self.random.random())

    def new_word(self) -> str:
        self._words += 1
        return f"w{self._words}"

    def tell(self, who: str, what: str) -> None:
        """Write a line of the trace. Only to be called where there is one: lines cost more than the rest."""
        if self.trace is not None:
            self.trace(f"{self.now:12.6f}  {who:<4}  {what}")

    def count_fault(self, kind: str) -> None:
        self.faults[kind] = self.faults.get(kind, 0) + 1

    # Processes.

    def add(self, process: Process) -> None:
        self.processes[process.name] = process

    def kill(self, process: Process) -> None:
        process.alive = False
        self.processes.pop(process.name, None)

    def start(self, task: Task) -> None:
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
            task.place = request.place
            if task.place:
                self.in_line[request.place] = task
                self._look_at_line(task, request.place)
        else:
            self._ask(task, request)

    def _wake(self, task: Task, sleep: int) -> None:
        if task.sleeping == sleep:
            task.sleeping += 1
            self.in_line.pop(task.place, None)
            self._go_on(task, task.process.now)

    def _look_at_line(self, task: Task, place: str) -> None:
        process = task.process
        due = process.line.due(place)
        if due < float("inf"):
            # A little later: a step that is too small for a float would not let time pass.
            left = max(0.0, due - process.now) / process.clock.rate + 1e-6
            self.at(self.now + left, self._wake, task, task.sleeping)

    # Messages to nodes, and their answers.

    def delay(self, *, is_undo: bool = False) -> float | None:
        """Return how long a message takes; None for ever, and then its connection breaks.

        That of an undo is not lost by itself: where hundreds are owed, no connection would last.
        """
        chance = self.random.random
        dice = chance()
        if dice < self.lost and not is_undo:
            self.count_fault("message lost")
            return None
        if dice > 1 - self.late:
            self.count_fault("message late")
            return self.weather.lateness * -math.log(1 - chance())
        return self.weather.latency * (0.5 + chance())

    def _broadcast(self, task: Task, request: Broadcast) -> Replies | None:
        process = task.process
        began = process.now
        process.nodes.open_absent(began)
        ballot = Ballot(request, task)
        process.nodes.ask(ballot, request, began)
        if ballot.complete or request.patience <= 0:
            return Replies(began, began, ballot.close())
        task.ballot = ballot
        task.began = began
        self.at(self.now + request.patience / process.clock.rate, self._give_up, task, ballot)
        return None

    def is_cut(self, process: Process, server: Server) -> bool:
        return bool(self.cut) and (process.name, server.number) in self.cut

    def send(self, link: Link, pending: PendingReply) -> None:
        delay = self.delay(is_undo=pending.broadcast is None)
        if delay is None or self.is_cut(link.process, link.server):
            self._lose(link)
        else:
            arrives = self.now + delay
            if self.weather.in_order:
                arrives = link.free_at = max(arrives, link.free_at)
            self.at(arrives, self._deliver, link, pending)
        if self.doubled and self.random.random() < self.doubled:
            self.count_fault("message doubled")
            again = self.random.expovariate(1.0) * 10 * self.weather.lateness
            self.at(self.now + again, self._deliver, link, pending)

    def _deliver(self, link: Link, pending: PendingReply) -> None:
        server, command = link.server, pending.command
        node = server.node
        if node.run != link.run or server.down:
            self._lose(link)
            return
        if server.frozen_until > self.now:
            self.at(server.frozen_until, self._deliver, link, pending)
            return
        if command.script == SUBSCRIBE:
            link.is_subscribed = True
            answer = _SUBSCRIBED
        else:
            answer = server.look(self.now).execute(command)
            if self.trace is not None:
                self.tell(node.name, f"{link.process.name} {_spoken(command)} → {_heard(answer)}")
        delay = self.delay(is_undo=pending.broadcast is None)
        if delay is None:
            self._lose(link)
        else:
            self.at(self.now + delay, self._arrive, link, (pending, answer))

    def _arrive(self, link: Link, data: Any) -> None:
        process = link.process
        if not process.alive or not self._is_open(link):
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._arrive, link, data)
            return
        for place in process.nodes.receive(link.index, lambda: data, process.now):
            task = self.in_line.get(place)
            if task is not None:
                self._look_at_line(task, place)

    @staticmethod
    def _is_open(link: Link) -> bool:
        nodes, seats = link.process.nodes, link.process.seats
        return link.index < len(seats) and nodes.connection(link.index) is link

    def _lose(self, link: Link) -> None:
        self.at(self.now + CONNECTING * (0.5 + self.random.random()), self._break_link, link)

    def _break_link(self, link: Link) -> None:
        process = link.process
        if not process.alive or not self._is_open(link):
            return
        if process.frozen_until > self.now:
            self.at(process.frozen_until, self._break_link, link)
            return
        process.nodes.broken(link.index, _BROKEN.detail)
        process.open_again()

    def _give_up(self, task: Task, ballot: Ballot) -> None:
        if task.ballot is ballot and task.process.frozen_until > self.now:
            self.at(task.process.frozen_until, self._give_up, task, ballot)  # what has arrived is read first
        else:
            self.count(task, ballot)

    def count(self, task: Task, ballot: Ballot) -> None:
        """Have a task go on with the answers that there are, if it still waits for them."""
        if task.ballot is ballot:
            self._go_on(task, Replies(task.began, task.process.now, ballot.close()))

    def _publisher(self, server: Server) -> Callable[[str, str], bool]:
        def publish(client: str, message: str) -> bool:
            process = self.processes.get(client)
            if process is None or server.number not in process.seats:
                return False
            link = process.nodes.connection(process.seats.index(server.number))
            if not isinstance(link, Link) or link.run != server.node.run or not link.is_subscribed:
                return False
            delay = self.delay()
            if delay is None:
                self._lose(link)
            else:
                self.at(self.now + delay, self._arrive, link, message.encode())
            return True

        return publish

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
            self._go_on(task, None, ConnectionLost())


def _spoken(command: Command) -> str:
    keys = ",".join(key.rpartition(":")[2] for key in command.keys[1:])
    words = " ".join(str(argument) for argument in command.arguments[2 if command.nonce else 1 :])
    return " ".join(filter(None, (command.script.upper(), keys, command.nonce, words[:100])))


def _heard(answer: Reply) -> str:
    counters = ",".join(map(str, answer.counters))
    facts = " ".join(fact for fact in answer.facts if not fact.startswith("{"))
    return " ".join(filter(None, (answer.kind.name, f"{answer.epoch}:{counters}" if counters else "", facts)))


def _short(result: Any) -> str:
    return f"{type(result).__name__}: {result}"[:160] if isinstance(result, Exception) else str(result)[:160]
