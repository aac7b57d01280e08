"""The line in etcd: its transactions, and a client's steps."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from .judge import Held
from .rules import Rules
from .store import PATIENCE, Base, Entry, GoneError, LostError, Node, Owner, Store, Who
from .world import Client, Operator, Steps, validity

#: Short ones, so that much happens while an owner lives; whole seconds in truth.
_TTLS: Final = (700, 700, 1000, 1500)


class View(NamedTuple):
    """Lines, marks with their revisions, and the base, as one transaction reads them."""

    lines: dict[int, list[Entry]]
    marks: dict[int, tuple[int, int]]
    base: Base

    def own(self, who: Who) -> list[Entry]:
        return [entry for line in self.lines.values() for entry in line if entry.who == who]

    def first(self, who: Who) -> bool:
        return all(line and line[0].who == who for line in self.lines.values())


@dataclass(slots=True)
class Mint:
    """What a mint puts, and compares."""

    tokens: dict[int, int]
    marks: dict[int, tuple[int, int]]
    base: Base


class Etcd(Store):
    """Each method is one request, and each transaction one revision."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    def grant(self, lease: int, ttl: int) -> bool:
        """Return False where the lease exists."""
        if lease in self.state.owners:
            return False
        self.state.owners[lease] = Owner(ttl, self.now + ttl)
        return True

    def keep_alive(self, lease: int) -> int:
        if (owner := self.state.owners.get(lease)) is None:
            return 0
        owner.ends = self.now + owner.ttl
        return owner.ttl

    def revoke(self, lease: int) -> None:
        self.end(lease)

    def _put_entries(self, lease: int, resources: list[int]) -> None:
        if lease not in self.state.owners:
            raise GoneError
        self.state.revision += 1
        for resource in resources:
            there = self.line(resource).get(lease)
            if there is None:
                self.line(resource)[lease] = Entry(lease, self.state.revision, lease)
            elif not self.rules.keeps_entries:
                there.owner = lease

    def _may_mint(self, mint: Mint) -> bool:
        rules, nodes = self.rules, self.state.nodes
        if rules.compares_base and self.base().value != mint.base.value:
            return False
        if rules.source == "place":
            return True
        there = {resource: nodes.get(resource, Node()) for resource in mint.tokens}
        if rules.compares_value:
            return all(there[resource].mark < token for resource, token in mint.tokens.items())
        return all(there[resource].version == mint.marks[resource][1] for resource in mint.tokens)

    def _put_marks(self, who: Who, tokens: dict[int, int]) -> None:
        for resource, token in tokens.items():
            self.state.nodes[resource] = Node(token, self.state.revision)
        self.note(who, tokens)

    def fast(self, lease: int, resources: list[int], mint: Mint, waits: bool) -> tuple[bool, View]:
        """Enter and mint where all lines are empty; else enter."""
        if not any(self.line(resource) for resource in resources) and self._may_mint(mint):
            self._put_entries(lease, resources)
            self._put_marks(lease, mint.tokens)
            return True, self.look(resources)
        if waits:
            self._put_entries(lease, resources)
        return False, self.look(resources)

    def enter(self, lease: int, resources: list[int]) -> None:
        self._put_entries(lease, resources)

    def look(self, resources: list[int]) -> View:
        lines = {
            each: sorted(
                (Entry(entry.who, entry.created, entry.owner) for entry in self.line(each).values()),
                key=lambda entry: entry.created,
            )
            for each in resources
        }
        nodes = {each: self.state.nodes.get(each, Node()) for each in resources}
        return View(lines, {each: (node.mark, node.version) for each, node in nodes.items()}, self.base())

    def mint(self, who: Who, created: int, mint: Mint) -> bool:
        for resource in mint.tokens:
            own = self.line(resource).get(who)
            if self.rules.entry != "none" and own is None:
                return False
            if self.rules.entry == "revision" and own is not None and own.created != created:
                return False
        if not self._may_mint(mint):
            return False
        self.state.revision += 1
        self._put_marks(who, mint.tokens)
        return True

    def move(self, who: Who, resources: list[int], old: int, new: int) -> bool:
        entries = [self.line(resource).get(who) for resource in resources]
        if any(entry is None or (self.rules.moves_by_lease and entry.owner != old) for entry in entries):
            return False
        if new not in self.state.owners:
            raise GoneError
        self.state.revision += 1
        for entry in entries:
            assert entry is not None
            entry.owner = new
        return True

    def prune(self, resource: int, mark: int) -> bool:
        node = self.state.nodes.get(resource)
        if self.line(resource) or node is None or node.mark != mark:
            return False
        self.state.revision += 1
        del self.state.nodes[resource]
        return True

    def force(self, resource: int) -> None:
        if (head := self.head(resource)) is not None:
            self.taken.append(head.who)
            self.end(head.owner)


@dataclass(slots=True)
class Lock(Held):
    """An acquisition in etcd; more than one lease while a move is in doubt."""

    leases: list[int] = field(default_factory=list)
    created: int = 0


class EtcdClient(Client):
    """A process that takes locks."""

    store: Etcd

    def begin(self) -> None:
        self.marks: dict[int, tuple[int, int]] = {}
        self.base = Base()

    def new(self, resources: list[int]) -> Held:
        return Lock(resources)

    def acquire(self, held: Held, end: float) -> Steps[bool]:
        lock = self._own(held)
        try:
            if (yield from self._enter(lock)) or (yield from self._wait(lock, end)):
                return True
        except LostError:
            pass
        yield from self.release(lock)
        return False

    def _grant(self, lock: Lock, ttl: int) -> Steps[int]:
        """Grant a lease with an id of its own; return it, with the time from which it counts."""
        lease, since = self.number(), self.mono()
        lock.leases.append(lease)
        for _ in range(3):
            sent = self.mono()
            try:
                new = yield self.store.grant, (lease, ttl)
            except LostError:
                continue
            lock.since = sent if new or not self.rules.counts_from_first else since
            return lease
        raise LostError

    def _enter(self, lock: Lock) -> Steps[bool]:
        """Enter all lines under a new lease; return whether the lock is held at once."""
        lock.leases.clear()
        lock.ttl = self.random.choice(_TTLS)
        lock.who = yield from self._grant(lock, lock.ttl)
        self.world.judge.entered(lock)
        try:
            if not self.rules.enters_at_once:
                for resource in sorted(lock.resources, key=lambda _: self.random.random()):
                    yield from self._queue(lock, resource)
                return False
            if self.random.random() < 0.2:
                yield self.store.enter, (lock.who, lock.resources)
                return False
            mint = self._mint({each: self.marks.get(each, (0, 0)) for each in lock.resources}, 0)
            waits = self.random.random() < 0.9
            held, view = yield self.store.fast, (lock.who, lock.resources, mint, waits)
        except (GoneError, LostError):
            return False
        self._remember(view)
        if not held:
            return False
        lock.created = view.own(lock.who)[0].created if view.own(lock.who) else 0
        return self.take(lock, mint.tokens)

    def _queue(self, lock: Lock, resource: int) -> Steps[None]:
        """Control: enter one line, and wait there before the next."""
        while True:
            try:
                yield self.store.enter, (lock.who, [resource])
                view = yield self.store.look, ([resource],)
            except LostError:
                continue
            yield from self._renew(lock)
            if not view.own(lock.who) or view.first(lock.who):
                return
            yield self.random.uniform(20, 100)

    def _remember(self, view: View) -> None:
        self.marks |= view.marks
        self.base = view.base

    def _mint(self, marks: dict[int, tuple[int, int]], place: int) -> Mint:
        now = self.clock()
        place = place or self.store.state.revision + 1
        tokens = {
            each: self.rules.mint(mark, self.base.value, now, place) for each, (mark, _) in marks.items()
        }
        return Mint(tokens, marks, self.base)

    def _wait(self, lock: Lock, end: float) -> Steps[bool]:
        while self.mono() < end or self.world.calm:
            try:
                view = yield self.store.look, (lock.resources,)
                self._remember(view)
                if len(view.own(lock.who)) < len(lock.resources):
                    if (yield from self._enter_anew(lock)):
                        return True
                elif view.first(lock.who):
                    lock.created = view.own(lock.who)[0].created
                    if self.valid(lock) < self.mono() + PATIENCE:
                        yield from self._renew(lock)
                    if (yield from self.mint(lock, view)):
                        return True
                else:
                    yield self.random.uniform(20, 100)
                    yield from self._renew(lock)
            except LostError:
                pass
        return False

    def _enter_anew(self, lock: Lock) -> Steps[bool]:
        try:
            if (yield self.store.keep_alive, (lock.who,)):
                yield self.store.enter, (lock.who, lock.resources)
                return False
        except GoneError:
            pass
        return (yield from self._enter(lock))

    def mint(self, lock: Lock, view: View) -> Steps[bool]:
        mint = self._mint(view.marks, lock.created)
        done = yield self.store.mint, (lock.who, lock.created, mint)
        return bool(done) and self.take(lock, mint.tokens)

    def _renew(self, lock: Lock) -> Steps[bool]:
        """Renew all leases. The validity counts from before the first request."""
        sent = self.mono()
        for lease in lock.leases:
            if not (yield self.store.keep_alive, (lease,)):
                return False
        lock.since = sent
        return True

    def extend(self, held: Held) -> Steps[bool]:
        lock = self._own(held)
        if not (yield from self._renew(lock)):
            return False
        self.prolong(lock)
        if len(lock.leases) > 1:
            return (yield from self._finish_move(lock, lock.ttl))
        if self.random.random() < self.world.weather.moves:
            return (yield from self._move(lock, lock.ttl + self.random.choice([100, 300, 800])))
        return True

    def _move(self, lock: Lock, ttl: int) -> Steps[bool]:
        """Put the entries under a new lease that lives longer."""
        since, sent = lock.since, self.mono()
        try:
            yield from self._grant(lock, ttl)
        except LostError:
            lock.leases.pop()
            raise
        finally:
            lock.since = since
        new = lock.leases[-1]
        try:
            return (yield from self._finish_move(lock, ttl, sent))
        except LostError:
            if not self.rules.keeps_both and new in lock.leases:
                lock.leases.remove(new)
            raise

    def _finish_move(self, lock: Lock, ttl: int, sent: float | None = None) -> Steps[bool]:
        old, new = lock.leases
        try:
            done = yield self.store.move, (lock.who, lock.resources, old, new)
            if not done:
                view = yield self.store.look, (lock.resources,)
                own = view.own(lock.who)
                done = len(own) == len(lock.resources) and all(entry.owner == new for entry in own)
        except GoneError:
            return False
        if done:
            lock.leases = [new]
            if sent is not None:
                lock.ttl, lock.since = ttl, sent
                self.prolong(lock)
            with suppress(LostError):
                yield self.store.revoke, (old,)
        return bool(done)

    def remint(self, held: Held) -> Steps[bool]:
        lock = self._own(held)
        view = yield self.store.look, (lock.resources,)
        self._remember(view)
        if self.rules.source == "place":
            lock.created = 0
        return (yield from self.mint(lock, view))

    def keep(self, held: Held, until: int) -> Steps[bool]:
        """Keep the entries beyond the release."""
        lock = self._own(held)
        if len(lock.leases) > 1:
            return False
        new = yield from self._grant(lock, max(500, -(-(until - self.clock()) // 100) * 100))
        moved = yield from self._finish_move(lock, 0)
        return moved and new in lock.leases

    def release(self, held: Held) -> Steps[None]:
        for lease in self._own(held).leases:
            yield from self._revoke(lease)

    def _revoke(self, lease: int) -> Steps[None]:
        for _ in range(3):
            try:
                yield self.store.revoke, (lease,)
            except LostError:
                continue
            return

    def _own(self, held: Held) -> Lock:
        assert isinstance(held, Lock)
        return held

    def valid(self, held: Held) -> float:
        return held.since + validity(held.ttl)

    def prune(self, resource: int) -> Steps[None]:
        view = yield self.store.look, ([resource],)
        mark, _ = view.marks[resource]
        if self.is_old(mark, view.base.value):
            yield self.store.prune, (resource, mark)


class EtcdOperator(Operator, EtcdClient):
    """Does what operators do."""
