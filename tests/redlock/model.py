"""A network between nodes in memory and many clients that does its worst, without time.

It plays only attempts, one after the other. So it makes schedules that no network with delays would make, at
a hundred thousand deliveries a second. `proof/simulation` has everything else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol.attempts import Attempt, Failed, NodeSet
from fencelock.authority.redlock.protocol.messages import Command, Reply
from proof.simulation.node import ModelNode
from tests.redlock.stage import Bidder, node_set_of

FINGERPRINT = "fleet"


def node_with(node_class: type[ModelNode], base: int) -> ModelNode:
    """Return a node that has been initialised; its time does not pass."""
    node = node_class()
    node.hash |= {"e": 0, "p": 0, "r": node.run, "cfg": FINGERPRINT, "b": base}
    node.unbroken = True
    return node


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
    attempt: Attempt
    round: int
    node: int
    command: Command
    answer: Reply | None = None


@dataclass
class History:
    """What was granted, and which promises that broke."""

    largest: dict[str, int] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    completed: int = 0
    failed: int = 0
    confirmed: int = 0
    violations: list[str] = field(default_factory=list)

    def note(self, contender: Contender, outcome: Grant) -> None:
        """Check a grant against P1 and P2, and remember it."""
        self.completed += 1
        for resource, token in zip(outcome.resources, outcome.tokens, strict=True):
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
        self.node_set: NodeSet = node_set_of(FINGERPRINT, len(nodes))
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
            node.hash["e"] += 1
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

    def _arrive(self, message: Message, answer: Reply) -> None:
        contender = message.contender
        bidder = contender.bidder
        if message.attempt is not bidder.attempt or message.round != contender.round:
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
        if isinstance(bidder.outcome, Grant):
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
        return Bidder(self.node_set, *wanted, alone=self.random.random() < 0.2, nonce=f"n{self._number}")

    def _broadcast(self, contender: Contender) -> None:
        contender.round += 1
        self._post(contender, contender.bidder.request.command, contender.bidder.request.nodes)

    def _post(self, contender: Contender, command: Command, nodes: Sequence[int]) -> None:
        for node in nodes:
            self.messages.append(Message(contender, contender.bidder.attempt, contender.round, node, command))
        # What has been under way for very long is lost, so that the rest gets its turn.
        while len(self.messages) > 40 * len(self.nodes):
            self.messages.pop(self.random.randrange(len(self.messages)))
