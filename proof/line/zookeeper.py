"""The line in ZooKeeper: its requests, and a client's steps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

from .judge import Held
from .rules import OUTAGE, Rules
from .store import Base, Entry, GoneError, LostError, Minted, Node, Owner, Store, Who
from .world import Client, Operator, Steps, validity

TIMEOUT: Final = 1600
#: A leader hears from its followers which sessions live, some time after they have heard it.
_LAG: Final = TIMEOUT // 4
#: A name of an entry: `<nonce>-<number>`.
Key = tuple[Who, int]


class SessionError(Exception):
    """The session has expired; its client needs another one."""


@dataclass(slots=True)
class Mint:
    """What a mint sets, and checks: versions of the parents and of the base, as they were read."""

    tokens: dict[int, int]
    versions: dict[int, int]
    base: Base
    kept: int = 0


class ZooKeeper(Store):
    """Each method is one request, or one multi. Requests of a session arrive in their order."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    def connect(self, session: int) -> None:
        """Begin a session. It gets its number here in truth; its client chooses it in the model."""
        self.state.owners[session] = Owner(TIMEOUT, self.now + TIMEOUT)

    def close(self, session: int) -> None:
        self.end(session)

    def serve(self, session: int, lag: float, seen: int, request: str, *arguments: Any) -> tuple[int, Any]:
        """Serve a session's request; return the revision too. A server that is behind its client refuses."""
        if seen > self.state.revision:
            raise LostError
        if (owner := self.state.owners.get(session)) is None:
            raise GoneError
        owner.ends = max(owner.ends, self.now - lag + owner.ttl)
        try:
            value = getattr(self, "do_" + request)(session, *arguments)
        except LookupError:
            value = None
        return self.state.revision, value

    def do_sync(self, _: int, entries: dict[int, Key]) -> bool:
        """Tell whether all entries exist; a sync goes before, so that this is not old."""
        return all(key in self.line(resource) for resource, key in entries.items())

    def do_parents(self, _: int, resources: list[int]) -> None:
        for resource in resources:
            self.state.revision += 1
            self.state.nodes.setdefault(resource, Node())

    def do_enter(self, session: int, who: Who, resources: list[int], gone: dict[int, Key]) -> dict[int, Key]:
        """Delete the remains of an earlier place, and make the entries, all or none."""
        nodes = {resource: self.state.nodes[resource] for resource in resources}
        if any(key not in self.line(resource) for resource, key in gone.items()):
            raise LookupError
        self.do_delete(session, gone)
        keys = {}
        for resource, node in nodes.items():
            keys[resource] = (who, node.number)
            self.line(resource)[who, node.number] = Entry(who, self.state.revision, session)
            node.number += 1
        return keys

    def do_enter_minting(
        self, session: int, who: Who, resources: list[int], mint: Mint
    ) -> dict[int, Key] | None:
        """Make the entries and set the marks in one multi, if nothing has changed."""
        nodes = {resource: self.state.nodes[resource] for resource in resources}
        if self.rules.compares_base and mint.base.version != self.base().version:
            return None
        if any(node.version != mint.versions[resource] for resource, node in nodes.items()):
            return None
        keys = self.do_enter(session, who, resources, {})
        for resource, node in nodes.items():
            node.mark, node.kept, node.version = mint.tokens[resource], 0, node.version + 1
        # Perhaps out of turn, and then not used.
        self.minted.append(Minted(who, mint.tokens, ahead=False))
        return keys

    def do_children_and_version(self, _: int, resource: int) -> tuple[list[Key], int]:
        return self.do_children(0, resource), self.state.nodes[resource].version

    def do_delete(self, _: int, keys: dict[int, Key]) -> None:
        self.state.revision += 1
        for resource, key in keys.items():
            self.line(resource).pop(key, None)

    def do_children(self, _: int, resource: int) -> list[Key]:
        line = self.line(resource)
        return sorted((self.named(key) for key in line), key=lambda key: key[1])

    @staticmethod
    def named(key: Hashable) -> Key:
        assert isinstance(key, tuple)
        return key

    def do_data(self, _: int, resource: int) -> Node:
        node = self.state.nodes[resource]
        return Node(node.mark, node.version, node.number, node.kept)

    def do_base(self, _: int) -> Base:
        return self.base()

    def do_mint(self, _: int, who: Who, entries: dict[int, Key], mint: Mint) -> bool:
        """Set the marks; with `kept`, which tells until when, delete the entries too."""
        rules, nodes = self.rules, self.state.nodes
        if rules.entry != "none" and not self.do_sync(0, entries):
            return False
        if rules.compares_base and mint.base.version != self.base().version:
            return False
        there = {resource: nodes[resource] for resource in mint.tokens}
        if any(node.version != mint.versions[resource] for resource, node in there.items()):
            return False
        self.state.revision += 1
        for resource, node in there.items():
            node.mark, node.kept, node.version = mint.tokens[resource], mint.kept, node.version + 1
        if mint.kept:
            self.do_delete(0, entries)
        else:
            self.note(who, mint.tokens)
        return True

    def do_prune(self, _: int, resource: int, version: int) -> bool:
        node = self.state.nodes[resource]
        if self.line(resource) or node.version != version:
            return False
        self.state.revision += 1
        del self.state.nodes[resource]
        if self.rules.prune_raises:
            self.state.base.version += 1
        return True

    def force(self, resource: int, whole: bool = True) -> None:  # noqa: FBT002 - sent as it is
        """Delete the entry at the head of a line, or all that its acquisition has."""
        if (head := self.head(resource)) is None:
            return
        self.taken.append(head.who)
        self.state.revision += 1
        for each, line in self.state.lines.items():
            if whole or each == resource:
                for key in [key for key, entry in line.items() if entry.who == head.who]:
                    del line[key]


@dataclass(eq=False, slots=True)
class Lock(Held):
    """An acquisition in ZooKeeper."""

    entries: dict[int, Key] = field(default_factory=dict)
    early: dict[int, Node] = field(default_factory=dict)


class ZooKeeperClient(Client):
    """A process with one session."""

    store: ZooKeeper

    def begin(self) -> None:
        self.session = self.seen = 0
        self.heard = 0.0
        self._cut = self._holding = False
        self._names = self.number() << 32
        self.base: Base | None = None
        self.marks: dict[int, Node] = {}
        #: Marks with their versions, as this connection has seen them last.
        self.known: dict[int, Node] = {}
        self._ping()

    def _ping(self) -> None:
        """Keep the session alive beside everything else, while the process is not paused."""
        if self.done:
            return
        world, owner = self.world, self.store.state.owners.get(self.session)
        fine = world.now >= self.paused and not self.store.down and self.seen <= self.store.state.revision
        if (
            owner is not None
            and owner.ends > world.now
            and fine
            and (world.calm or world.random.random() < 0.8)
        ):
            self._hear()
            lag = world.random.uniform(0, _LAG)
            owner.ends = max(owner.ends, world.now - lag + owner.ttl)
        world.at(TIMEOUT / 4, self._ping)

    def _ask(self, request: str, *arguments: Any) -> Steps[Any]:
        """Send a request in the session, and begin one where there is none."""
        if self.session and self._cut and not self._holding and self.rules.retires:
            session, self.session = self.session, 0
            yield self.store.close, (session,)
            raise SessionError
        if not self.session:
            session, self.seen = self.number(), 0
            yield self.store.connect, (session,)
            self.session, self.heard, self._cut = session, self.mono(), False
            if self.rules.forgets_base:
                self.base = None
        lag = self.random.uniform(0, _LAG)
        try:
            self.seen, value = yield self.store.serve, (self.session, lag, self.seen, request, *arguments)
        except GoneError:
            self.session = 0
            self._forget()
            raise SessionError from None
        except LostError:
            self._forget()
            if self.mono() < self.heard + TIMEOUT:
                raise
            self.session = 0  # a wiped server never tells: it refuses a client that has seen more than it
            raise SessionError from None
        self._hear()
        return value

    def _forget(self) -> None:
        if self.rules.forgets_known:
            self.known.clear()

    def _hear(self) -> None:
        """Note whether nothing was heard for as long as a restore takes."""
        self._cut |= self.mono() - self.heard > 0.9 * OUTAGE
        self.heard = self.mono()

    def new(self, resources: list[int]) -> Held:
        return Lock(resources)

    def acquire(self, held: Held, end: float) -> Steps[bool]:
        lock = self._own(held)
        lock.ttl = self.random.choice([500, 1000, 4000])
        self._name(lock)
        while self.mono() < end or self.world.calm:
            try:
                if (yield from self._try(lock)):
                    self._holding = True
                    return True
            except LostError:
                pass
            except SessionError:
                self._name(lock)  # the session that was given up may live, and its entries with it
        yield from self.release(lock)
        return False

    def _name(self, lock: Lock) -> None:
        self._names += 1
        lock.who = self._names
        self.world.judge.entered(lock)

    def _try(self, lock: Lock) -> Steps[bool]:
        """Find the own entries, or make them; mint where all are first, else wait a little."""
        known = {each: self.known.pop(each) for each in lock.resources if each in self.known}
        if len(known) == len(lock.resources) and not lock.entries and self.base is not None:
            return (yield from self._enter_minting(lock, known))
        lines = yield from self._lines(lock)
        if len(lock.entries) < len(lock.resources):
            yield from self._enter(lock)
            return False
        if all(line[0] == lock.entries[resource] for resource, line in lines.items()):
            return (yield from self._hold(lock))
        yield self.random.uniform(20, 100)
        return False

    def _enter_minting(self, lock: Lock, known: dict[int, Node]) -> Steps[bool]:
        """Mint while entering; hold if all are first, and no other has minted since."""
        assert self.base is not None
        lock.since, now = self.mono(), self.clock()
        tokens = {
            each: self.rules.mint(node.mark, self.base.value, now, self.seen) for each, node in known.items()
        }
        versions = {each: node.version for each, node in known.items()}
        mint = Mint(tokens, versions, self.base)
        made = yield from self._ask("enter_minting", lock.who, lock.resources, mint)
        if made is None:
            self.base = None
            return False
        lock.entries = made
        for each, key in made.items():
            found = yield from self._ask("children_and_version", each)
            if found is None or found[0][:1] != [key]:
                return False
            if self.rules.compares_mark and found[1] != versions[each] + 1:
                return False
        self.known |= {each: Node(token, versions[each] + 1) for each, token in tokens.items()}
        return self.take(lock, tokens)

    def _lines(self, lock: Lock) -> Steps[dict[int, list[Key]]]:
        lines = {}
        for resource in lock.resources:
            lines[resource] = yield from self._ask("children", resource)
        lock.entries = {
            resource: key for resource, line in lines.items() for key in line if key[0] == lock.who
        }
        return lines

    def _enter(self, lock: Lock) -> Steps[None]:
        rules, gone = self.rules, dict(lock.entries)
        missing = [resource for resource in lock.resources if resource not in gone]
        if not rules.reads_in_line:
            lock.early = {each: self.marks[each] for each in lock.resources if each in self.marks}
        if not rules.enters_at_once:
            resources, gone = [self.random.choice(missing)], {}
        elif not rules.all_anew:
            resources, gone = missing, {}
        else:
            resources = lock.resources
        if (yield from self._ask("enter", lock.who, resources, gone)) is None:
            yield from self._ask("parents", lock.resources)

    def _hold(self, lock: Lock) -> Steps[bool]:
        """Mint; the validity counts from before the request."""
        if self.base is None or self.random.random() < 0.1:
            self.base = yield from self._ask("base")
        nodes = {}
        for resource in lock.resources:
            nodes[resource] = yield from self._ask("data", resource)
        if None in nodes.values():
            return False
        wait = max(node.kept for node in nodes.values()) - self.clock()
        if wait > 0:
            yield min(wait, 100.0)
            return False
        lock.since = self.mono()
        if not self.rules.reads_in_line:
            nodes |= lock.early
        lock.early = {}
        return (yield from self._mint(lock, nodes))

    def _mint(self, lock: Lock, nodes: dict[int, Node]) -> Steps[bool]:
        assert self.base is not None
        now, place = self.clock(), self.seen
        if self.rules.source == "place" and not lock.tokens:
            place = 1 + lock.entries[lock.resources[0]][1]
        tokens = {
            each: self.rules.mint(node.mark, self.base.value, now, place) for each, node in nodes.items()
        }
        versions = {each: node.version for each, node in nodes.items()}
        mint = Mint(tokens, versions, self.base)
        self.marks |= {each: Node(token, versions[each] + 1) for each, token in tokens.items()}
        done = yield from self._ask("mint", lock.who, lock.entries, mint)
        if not done:
            self.base = None
        else:
            self.known |= {each: Node(token, versions[each] + 1) for each, token in tokens.items()}
        return bool(done) and self.take(lock, tokens)

    def extend(self, held: Held) -> Steps[bool]:
        lock, sent = self._own(held), self.mono()
        try:
            if not (yield from self._ask("sync", lock.entries)):
                return False
        except SessionError:
            return False
        lock.since = sent
        self.prolong(lock)
        return True

    def remint(self, held: Held) -> Steps[bool]:
        lock, nodes = self._own(held), {}
        try:
            if self.base is None:
                self.base = yield from self._ask("base")
            for resource in lock.resources:
                nodes[resource] = yield from self._ask("data", resource)
            return None not in nodes.values() and (yield from self._mint(lock, nodes))
        except SessionError:
            raise GoneError from None

    def keep(self, held: Held, until: int) -> Steps[bool]:
        """Say in the mark how long, and delete the entries."""
        lock, nodes = self._own(held), {}
        try:
            base = yield from self._ask("base")
            for resource in lock.resources:
                nodes[resource] = yield from self._ask("data", resource)
            if None in nodes.values():
                return False
            marks = {each: node.mark for each, node in nodes.items()}
            versions = {each: node.version for each, node in nodes.items()}
            mint = Mint(marks, versions, base, until)
            if (yield from self._ask("mint", lock.who, lock.entries, mint)):
                self._holding = False
                return True
        except LostError:
            pass
        except SessionError:
            return False
        yield from self.release(held)
        return False

    def release(self, held: Held) -> Steps[None]:
        """Delete the entries.

        No other client does while this session lives, so the deletion is owed until done.
        """
        lock = self._own(held)
        self._holding = False
        while True:
            try:
                yield from self._lines(lock)
                if lock.entries:
                    yield from self._ask("delete", lock.entries)
            except LostError:
                continue
            except SessionError:
                pass
            return

    def _own(self, held: Held) -> Lock:
        assert isinstance(held, Lock)
        return held

    def valid(self, held: Held) -> float:
        return held.since + min(validity(held.ttl), TIMEOUT * self.rules.part)

    def force(self, resource: int) -> Steps[None]:
        yield self.store.force, (resource, self.random.random() < 0.5)

    def prune(self, resource: int) -> Steps[None]:
        try:
            node = yield from self._ask("data", resource)
            base = yield from self._ask("base")
            if node is None or not self.is_old(node.mark, base.value):
                return
            if self.rules.spares_kept and node.kept > self.clock() - 1000:
                return
            yield from self._ask("prune", resource, node.version)
        except SessionError:
            pass


class ZooKeeperOperator(Operator, ZooKeeperClient):
    """Does what operators do."""
