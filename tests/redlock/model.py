"""A node in memory, and a network between such nodes and many clients that does its worst.

The node answers as the scripts do; `test_conformance.py` holds it to that on a real server. What it buys
is speed: a hundred thousand deliveries a second, so that random schedules have some power.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fencelock.authority.redlock.protocol import Answer, Bid, Command, Failed, Fleet, Granted, Said
from fencelock.token import MAX_COUNTER, compose
from tests.redlock.stage import NODE_KEY, Bidder, fleet_of

FINGERPRINT = "fleet"
_NO_EPOCH = -1


@dataclass
class Lock:
    """What a lock key holds."""

    nonce: str
    epoch: int
    counter: int | None


class ModelNode:
    """A node that has been initialised; `epoch` None makes it blank.

    Time does not pass here: locks expire when somebody calls `expire`.
    """

    def __init__(self, fingerprint: str = FINGERPRINT, base: int = 0) -> None:
        self.epoch: int | None = 0
        self.fingerprint = fingerprint
        self.base = base
        self.counters: dict[int, int] = {}
        self.locks: dict[str, Lock] = {}

    def execute(self, command: Command) -> Answer:
        """Answer a command as the script of its name does."""
        if self.epoch is None and command.script != "release":
            return Answer(Said.AMNESIA)
        arguments = command.arguments[2:]
        if command.arguments[0] != self.fingerprint:
            if command.script != "release":
                return Answer(Said.CONFIG)
            arguments = (_NO_EPOCH, *arguments[1:])  # a stranger's counters mean nothing here
        answer: Answer = getattr(self, command.script)(command.keys[1:], command.nonce, arguments)
        return answer

    def expire(self, key: str) -> None:
        """End a lock as its ttl does."""
        self.locks.pop(key, None)

    def counter(self, stripe: int) -> int:
        """Return where a stripe's counter stands."""
        return self.counters.get(stripe, self.base)

    def catch_up(self, stripe: int, decided: int) -> None:
        """Raise a stripe's counter, if it is below."""
        if decided > self.counter(stripe):
            self.counters[stripe] = decided

    def acquire(self, keys: Sequence[str], nonce: str, arguments: Sequence[Any]) -> Answer:
        """ACQUIRE."""
        assert self.epoch is not None
        old = arguments[6 + 2 * len(keys)] if len(arguments) > 2 + 2 * len(keys) else None
        locks = {key: self.locks[key] for key in keys if key in self.locks and self.locks[key].nonce != old}
        if any(lock.nonce != nonce or lock.counter is None for lock in locks.values()):
            return Answer(Said.HELD)
        ours = [key in locks and locks[key].epoch == self.epoch for key in keys]
        granted, counters = [], dict(self.counters)
        for i, key in enumerate(keys):
            stripe, hint = arguments[2 + 2 * i], arguments[3 + 2 * i]
            if ours[i]:
                granted.append(self.locks[key].counter or 0)
                continue
            last = counters.get(stripe, self.base)
            counters[stripe] = max(last + 1, hint if arguments[1] == self.epoch else 0)
            if counters[stripe] > MAX_COUNTER:
                return Answer(Said.FULL)
            granted.append(counters[stripe])
        self.counters = counters
        for key, counter, was_ours in zip(keys, granted, ours, strict=True):
            if not was_ours:
                self.locks[key] = Lock(nonce, self.epoch, counter)
        return Answer(Said.GRANTED, self.epoch, tuple(granted))

    def confirm(self, keys: Sequence[str], nonce: str, arguments: Sequence[Any]) -> Answer:
        """CONFIRM."""
        assert self.epoch is not None
        if arguments[0] != self.epoch:
            return Answer(Said.EPOCH)
        if not all(self.is_ours(key, nonce) for key in keys):
            return Answer(Said.LOST)
        counters = tuple(self.locks[key].counter or 0 for key in keys)
        if self.is_higher(counters, arguments[2::2]):
            return Answer(Said.HIGHER, self.epoch, counters)
        for stripe, decided in zip(arguments[1::2], arguments[2::2], strict=True):
            self.catch_up(stripe, decided)
        return Answer(Said.CONFIRMED)

    def is_ours(self, key: str, nonce: str) -> bool:
        """Whether a CONFIRM is of the lock that is there."""
        lock = self.locks.get(key)
        return (
            lock is not None and (lock.nonce, lock.epoch) == (nonce, self.epoch) and lock.counter is not None
        )

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:
        """Whether this node had granted more than what was decided."""
        return any(own > theirs for own, theirs in zip(counters, decided, strict=True))

    def release(self, keys: Sequence[str], nonce: str, arguments: Sequence[Any]) -> Answer:
        """RELEASE."""
        if self.epoch == arguments[0]:
            for stripe, decided in zip(arguments[1::2], arguments[2::2], strict=True):
                self.catch_up(stripe, decided)
        ours = [key for key in keys if key in self.locks and self.locks[key].nonce == nonce]
        for key in ours:
            del self.locks[key]
        return Answer(Said.RELEASED if len(ours) == len(keys) else Said.LOST)

    def extend(self, keys: Sequence[str], _: str, arguments: Sequence[Any]) -> Answer:
        """EXTEND."""
        codes, start = [], 0
        for nonce, _ttl, count, value in zip(*[iter(arguments)] * 4, strict=True):
            its_keys = keys[start : start + count]
            start += count
            missing = [key for key in its_keys if key not in self.locks]
            if any(self.locks[key].nonce != nonce for key in its_keys if key in self.locks):
                codes.append(0)
                continue
            for key in missing:
                self.locks[key] = Lock(nonce, int(value.split("|")[1]), None)
            codes.append(1 if missing else 2)
        return Answer(Said.EXTENDED, self.epoch or 0, tuple(codes))


class WithoutOwnership(ModelNode):
    """Mutant: CONFIRM does not ask whose the lock is."""

    def is_ours(self, key: str, nonce: str) -> bool:  # noqa: ARG002 - the mutation
        """Let anybody's lock do."""
        return key in self.locks

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - belongs to it
        """Compare nothing: the lock that is there is not the one that was granted."""
        return False


class WithoutComparison(ModelNode):
    """Mutant: CONFIRM counts where the node itself had granted more."""

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:  # noqa: ARG002 - the mutation
        """Never."""
        return False


@dataclass
class Contender:
    """A client that makes one attempt after the other.

    Attributes:
        floor: for each resource, the largest token that was complete when the present attempt began.
    """

    bidder: Bidder
    floor: dict[str, int]
    round: int = 0


@dataclass
class Message:
    """A command on its way to a node, or its answer on the way back."""

    contender: Contender
    bid: Bid
    round: int
    node: int
    command: Command
    answer: Answer | None = None


@dataclass
class History:
    """What was granted, and which promises that broke."""

    largest: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    completed: int = 0
    failed: int = 0
    confirmed: int = 0
    violations: list[str] = field(default_factory=list)

    def note(self, contender: Contender, outcome: Granted) -> None:
        """Check a grant against P1 and P2, and remember it."""
        self.completed += 1
        for resource, counter in zip(outcome.bid.resources, outcome.counters, strict=True):
            token = compose(outcome.epoch, counter)
            if token in self.seen.setdefault(resource, set()):
                self.violations.append(f"P1: {resource} was granted {token} twice")
            if token <= contender.floor.get(resource, 0):
                self.violations.append(f"P2: {resource} was granted {token} after a larger one")
            self.seen[resource].add(token)
            self.largest[resource] = max(self.largest.get(resource, 0), token)


class World:
    """Nodes, clients, and all messages under way; `step` lets one thing happen, whichever comes to mind.

    Messages are delayed, lost, duplicated and reordered; locks expire whenever they like, which is all that
    clocks and pauses can do; nodes move to larger epochs one by one.

    How often each of these happens is drawn from the seed: some holes need a calm network, others a wild one.

    Args:
        seed: of everything random; the same seed replays the same schedule.
        nodes: the nodes.
        clients: how many clients there are.
        resources: what they want; some attempts are for two of them at once.
        raise_epochs: how probable a move to a larger epoch is, for each step.
    """

    def __init__(
        self,
        seed: int,
        nodes: Sequence[ModelNode],
        *,
        clients: int,
        resources: Sequence[str] = ("r",),
        raise_epochs: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.expiring = self.random.uniform(0.01, 0.2)
        self.impatient = self.random.uniform(0.01, 0.1)
        self.duplicating = self.random.uniform(0.0, 0.15)
        self.losing = self.random.uniform(0.0, 0.08)
        self.nodes = nodes
        self.fleet: Fleet = fleet_of(FINGERPRINT, len(nodes))
        self.resources = resources
        self.raise_epochs = raise_epochs
        self.history = History()
        self.messages: list[Message] = []
        self._number = 0
        self.contenders = [Contender(self._bidder(), {}) for _ in range(clients)]
        for contender in self.contenders:
            self._broadcast(contender)

    def run(self, steps: int) -> History:
        """Take so many steps; stop at the first violation."""
        for _ in range(steps):
            self.step()
            if self.history.violations:
                break
        return self.history

    def step(self) -> None:
        """Let one thing happen."""
        dice = self.random.random()
        if dice < self.raise_epochs:
            node = self.random.choice(self.nodes)
            node.epoch = (node.epoch or 0) + 1
        elif dice < self.expiring:
            node = self.random.choice(self.nodes)
            if node.locks:
                node.expire(self.random.choice(sorted(node.locks)))
        elif dice < self.expiring + self.impatient or not self.messages:
            self._give_up_waiting(self.random.choice(self.contenders))
        else:
            self._move(self.random.randrange(len(self.messages)))

    def _move(self, index: int) -> None:
        dice = self.random.random()
        message = self.messages[index]
        if dice > self.duplicating:  # otherwise it is delivered, and its duplicate stays under way
            self.messages[index] = self.messages[-1]
            self.messages.pop()
        if dice > 1 - self.losing:
            return
        if message.answer is None:
            answer = self.nodes[message.node].execute(message.command)
            if message.command.script != "release":
                self.messages.append(replace(message, answer=answer))
        else:
            self._arrive(message, message.answer)

    def _arrive(self, message: Message, answer: Answer) -> None:
        contender = message.contender
        bidder = contender.bidder
        if message.bid is not bidder.bid or message.round != contender.round:
            return
        bidder.answers.setdefault(message.node, answer)
        if bidder.request.enough(bidder.answers):
            self._resume(contender)

    def _give_up_waiting(self, contender: Contender) -> None:
        # Mostly one that has heard something: the others would merely start over.
        if contender.bidder.answers or self.random.random() < 0.1:
            self._resume(contender)

    def _resume(self, contender: Contender) -> None:
        bidder = contender.bidder
        bidder.resume()
        if bidder.outcome is None:
            self.history.confirmed += 1
            self._broadcast(contender)
            return
        if isinstance(bidder.outcome, Granted):
            self.history.note(contender, bidder.outcome)
        if isinstance(bidder.outcome, Failed):
            self.history.failed += 1
        self._post(contender, bidder.undo(), range(len(self.nodes)))
        contender.floor = dict(self.history.largest)
        contender.bidder = self._bidder()
        self._broadcast(contender)

    def _bidder(self) -> Bidder:
        self._number += 1
        count = min(len(self.resources), self.random.choice((1, 1, 2)))
        wanted = self.random.sample(list(self.resources), count)
        return Bidder(self.fleet, *wanted, alone=self.random.random() < 0.2, nonce=f"n{self._number}")

    def _broadcast(self, contender: Contender) -> None:
        contender.round += 1
        self._post(contender, contender.bidder.request.command, contender.bidder.request.nodes)

    def _post(self, contender: Contender, command: Command, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.messages.append(Message(contender, contender.bidder.bid, contender.round, node, command))
        # What has been under way for very long is lost, so that the rest gets its turn.
        while len(self.messages) > 40 * len(self.nodes):
            self.messages.pop(self.random.randrange(len(self.messages)))


def lock_key(resource: str) -> str:
    """Return the key of a resource's lock."""
    return f"{NODE_KEY}:l:{resource}"
