"""A client acquires, holds, extends, writes, remints and releases, for ever.

The steps are those of `lock`, `renewal` and the guard, with the generators that ship; what those parts
do besides (threads, contexts, SQL) is not simulated. A client never looks whether its lease is still valid
before it writes: a process that has been paused cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fencelock.authority.base import Grant
from fencelock.authority.redlock.protocol import attempts, holding
from fencelock.authority.redlock.protocol.acquire import Acquisition
from fencelock.authority.redlock.protocol.attempts import abandon
from fencelock.authority.redlock.protocol.messages import Sleep
from fencelock.errors import FencelockError, LockLostError, QuorumError
from proof.simulation.judge import Judge
from proof.simulation.storage import Stale, Storage, Transaction
from proof.simulation.world import IDLE, Ask, ConnectionLost, Process, Program, Task


@dataclass(frozen=True, slots=True)
class Habits:
    """What clients keep to; all of it, unless a mutant leaves one out."""

    commits_first: bool = True  #: a lease outlives the COMMIT of what was written under it
    new_nonces: bool = True  #: every attempt has a nonce of its own
    mints_anew: bool = True  #: after a COMMIT in doubt, a new token before anything else
    claims_anew: bool = True  #: … and a claim with it before anything is read


class Hold:
    __slots__ = (
        *("busy", "client", "grant", "lost", "minting", "owner"),
        *("released", "resources", "tokens", "transaction"),
    )

    def __init__(self, client: Client, grant: Grant) -> None:
        self.client = client
        self.owner = client.process.name
        self.lost = self.released = self.busy = self.minting = False
        self.transaction: Transaction | None = None
        self.adopt(grant)

    def adopt(self, grant: Grant) -> None:
        self.grant = grant
        self.resources, self.tokens = grant.resources, grant.tokens

    def is_over(self) -> bool:
        """Whether it has been given back, or is known to have ended."""
        return self.released or self.lost

    def is_valid(self) -> bool:
        """Whether its holder may believe that no other client holds the lock.

        After a release, an open transaction still counts as a hold.
        """
        if self.lost or self.minting or not self.client.process.alive:
            return False  # a client that remints does nothing else meanwhile, and may find the lease ended
        writing = self.transaction is not None and not self.transaction.over
        return (writing or not self.released) and self.client.process.now < self.grant.expires_at


class Client:
    def __init__(
        self, process: Process, storage: Storage, judge: Judge, habits: Habits, writes: Iterator[int]
    ) -> None:
        self.world = world = process.world
        self.weather = world.weather
        self.process = process
        self._storage = storage
        self._judge = judge
        self._habits = habits
        self._writes = writes
        self._random = world.random
        self._task: Task | None = None
        self._transaction: Transaction | None = None
        self._floors: tuple[int, ...] = ()
        self.completed = 0

    def start(self, errand: Callable[[Client], Program] | None = None) -> Task:
        task = Task(self.process, "work", self._work() if errand is None else errand(self))
        self._task = task
        self.world.start(task)
        return task

    def leave_to_database(self) -> None:
        """After a crash: the database ends the last transaction, once it notices."""
        if self._transaction is not None:
            gone = 0.2 * self._random.random()
            self.world.at(self.world.now + gone, self._storage.roll_back, self._transaction)

    # Getting the lock.

    def acquire(
        self,
        resources: tuple[str, ...],
        ttl: float,
        timeout: float | None,
        *,
        fair: bool = False,
        go_on: Callable[[], None] = lambda: None,
    ) -> Generator[Any, Any, Hold]:
        process = self.process
        nonce = partial(self._new_nonce, resources)
        acquisition = Acquisition(resources, ttl, nonce, process.line, fair=fair)
        try:
            grant = yield from acquisition.acquire(
                process.current,
                began=process.now,
                since=process.now,
                timeout=timeout,
                grace=0.5,
                outage=0.5,
                jitter=self._random.random,
                go_on=go_on,
            )
        except FencelockError as error:
            self._judge.failed(process.name, error)
            raise
        hold = Hold(self, grant)
        self._learn(hold)
        return hold

    def _new_nonce(self, resources: tuple[str, ...]) -> str:
        """Return a nonce. The tokens that are out by now are below that of its attempt."""
        self._floors = self._judge.floors(resources)
        return self.world.new_word() if self._habits.new_nonces else self.process.name

    def _learn(self, hold: Hold) -> None:
        if self.world.trace is not None:
            self.world.tell(
                hold.owner,
                f"holds {','.join(hold.resources)} with {hold.grant.proof.epoch}:{hold.grant.proof.counters}",
            )
        self._judge.granted(hold.resources, hold.tokens, self._floors, hold)

    # Keeping it.

    def keep(self, hold: Hold) -> None:
        self.world.start(Task(self.process, "renewal", self._renew(hold)))

    def _renew(self, hold: Hold) -> Program:
        part = 3
        while True:
            ttl = hold.grant.proof.attempt.ttl
            yield Sleep(ttl / part * (0.9 + 0.2 * self._random.random()))
            if hold.is_over():
                return
            if hold.busy:
                continue
            grant = hold.grant
            hold.busy = True
            (outcome,) = yield from holding.extend(self.process.current(), [(grant, ttl)])
            hold.busy = False
            part = 20 if isinstance(outcome, QuorumError) else 3
            if isinstance(outcome, LockLostError):
                if not hold.is_over() and hold.is_valid():
                    self._judge.ended(hold, str(outcome))
                hold.lost = True
            elif isinstance(outcome, Grant) and hold.grant is grant:
                hold.grant = outcome
            if hold.is_over():
                yield from abandon(self.process.current(), grant.proof.attempt)

    def _remint(self, hold: Hold) -> Program:
        while hold.busy:
            yield Sleep(0.001)
        hold.busy = hold.minting = True
        old = hold.grant
        attempt = old.proof.attempt
        nonce = partial(self._new_nonce, attempt.resources)
        acquisition = Acquisition(attempt.resources, attempt.ttl, nonce, instead_of=old.proof)
        try:
            grant = yield from holding.remint(
                self.process.current, acquisition, old, jitter=self._random.random
            )
        except LockLostError:
            hold.lost = True
            raise
        hold.adopt(grant)
        hold.busy = hold.minting = False
        self._judge.reminted += 1
        self._learn(hold)

    def release(self, hold: Hold) -> Program:
        # Of an extension under way, which is not waited for here, the end releases as well.
        valid = hold.is_valid() and not hold.busy
        hold.released = True
        ours = yield from attempts.release(self.process.current, hold.grant.proof)
        if valid and ours is False:
            self._judge.ended(hold, "it was not there any more when it was given back")
        return ours

    # Using it.

    def _work(self) -> Program:
        weather, chance = self.weather, self._random.random
        while True:
            if weather.think:
                yield Sleep(weather.think * 2 * chance())
            resources = self._choose()
            timeout = (0.0, 0.5, 5.0, None)[int(chance() * 4)]
            try:
                hold = yield from self.acquire(resources, weather.ttl, timeout, fair=chance() < 0.1)
            except FencelockError:
                yield Sleep(0.05 * (0.5 + chance()))
                continue
            self.completed += 1
            with suppress(FencelockError, ConnectionLost):
                yield from self._use(hold)
            if hold.transaction is not None:
                self._storage.roll_back(hold.transaction)
            if not hold.released:
                yield from self.release(hold)

    def _choose(self) -> tuple[str, ...]:
        resources = self.weather.resources
        if len(resources) == 1:
            return resources
        if self._random.random() < 0.25:
            return tuple(sorted(self._random.sample(resources, 2)))
        return (resources[int(self._random.random() * len(resources))],)

    def _use(self, hold: Hold) -> Program:
        weather, chance = self.weather, self._random.random
        work = weather.work * 2 * chance()
        if chance() < 0.05:
            work = weather.ttl * 3 * chance()  # perhaps longer than the lease
        if work > weather.ttl / 4 and chance() < 0.6:
            self.keep(hold)
        if chance() < 0.05:
            yield from self._remint(hold)
        if chance() < 0.2:
            yield Sleep(work)  # what has nothing to do with the storage
            return
        dice = chance()
        write = self._write_in_transaction
        if dice < 0.4:
            write = self._write_at_once if dice < 0.25 else self._append
        try:
            yield from write(hold, work)
        except ConnectionLost:
            yield from self._find_out(hold)

    def _begin(self, hold: Hold) -> Transaction:
        transaction = Transaction(dict(zip(hold.resources, hold.tokens, strict=True)))
        self.world.at(self.world.now + IDLE, self._storage.roll_back, transaction)
        hold.transaction = transaction
        self._transaction = transaction
        return transaction

    def _read(self, hold: Hold, transaction: Transaction, row: str) -> Generator[Any, Any, int]:
        """Return what a row says, claimed before."""
        claims = self._storage.rules.claims
        statement = self._storage.claim if claims else self._storage.read
        name = f"{'CLAIM' if claims else 'SELECT'} {row} {transaction.token[row]}"
        value = yield Ask(name, partial(statement, transaction, row))
        if isinstance(value, Stale):
            self._refuse(hold, row, value)
        return value  # type: ignore[no-any-return]

    def _read_all(self, hold: Hold, transaction: Transaction) -> Generator[Any, Any, list[int]]:
        bases: list[int] = []
        for row in hold.resources:
            bases += [(yield from self._read(hold, transaction, row))]
        return bases

    def _refuse(self, hold: Hold, row: str, stale: Stale) -> None:
        self._judge.turned_away(row, hold.tokens[hold.resources.index(row)])
        hold.lost = True
        raise LockLostError(f"the storage has seen {stale.fence}")

    def _write(self, hold: Hold, transaction: Transaction, row: str, base: int) -> Program:
        value = next(self._writes)
        name = f"UPDATE {row} = {value} on {base}, {transaction.token[row]}"
        answer = yield Ask(name, partial(self._storage.write, transaction, row, value, base))
        if isinstance(answer, Stale):
            self._refuse(hold, row, answer)

    def _commit(self, transaction: Transaction) -> Program:
        if not (yield Ask("COMMIT", partial(self._storage.commit, transaction))):
            raise LockLostError("the transaction was ended by the database")

    def _write_in_transaction(self, hold: Hold, work: float) -> Program:
        transaction = self._begin(hold)
        bases = yield from self._read_all(hold, transaction)
        yield Sleep(work)
        for row, base in zip(hold.resources, bases, strict=True):
            yield from self._write(hold, transaction, row, base)
        if not self._habits.commits_first:
            yield from self.release(hold)
        yield from self._commit(transaction)

    def _write_at_once(self, hold: Hold, work: float) -> Program:
        """Claim in a transaction of its own, work, and write by a statement that commits itself."""
        row = hold.resources[0]
        transaction = self._begin(hold)
        base = yield from self._read(hold, transaction, row)
        yield from self._commit(transaction)
        yield Sleep(work)
        yield from self._update(hold, row, base)

    def _append(self, hold: Hold, work: float) -> Program:
        yield Sleep(work)
        yield from self._update(hold, hold.resources[0], None)

    def _update(self, hold: Hold, row: str, base: int | None) -> Program:
        """Write by one statement that commits itself: on the value that was read, or on the present one."""
        transaction = self._begin(hold)
        value = next(self._writes)
        storage = self._storage
        if not storage.rules.at_once:
            stale = yield Ask(f"SELECT fence of {row}", partial(storage.look, transaction, row))
            if stale is not None:
                self._refuse(hold, row, stale)

        def statement(reply: Callable[[Any], None]) -> None:
            def written(answer: Any) -> None:
                if isinstance(answer, Stale):
                    storage.roll_back(transaction)
                    reply(answer)
                else:
                    storage.commit(transaction, reply)

            if base is None:
                storage.append(transaction, row, value, written)
            else:
                storage.write(transaction, row, value, base, written)

        known = "what it says" if base is None else base
        answer = yield Ask(f"UPDATE {row} = {value} on {known}, {transaction.token[row]}; COMMIT", statement)
        if isinstance(answer, Stale):
            self._refuse(hold, row, answer)

    def _find_out(self, hold: Hold) -> Program:
        """After a COMMIT in doubt: remint, claim with the new token, and only then read and write."""
        if hold.transaction is not None:
            gone = 0.2 * self._random.random()  # until the database notices; a COMMIT may arrive before that
            self.world.at(self.world.now + gone, self._storage.roll_back, hold.transaction)
        if self._habits.mints_anew:
            yield from self._remint(hold)
        row = hold.resources[0]
        transaction = self._begin(hold)
        if self._habits.claims_anew:
            base = yield from self._read(hold, transaction, row)
        else:
            base = yield Ask(f"SELECT {row}", partial(self._storage.read, transaction, row))
        yield from self._commit(transaction)
        yield Sleep(self.weather.work)
        yield from self._update(hold, row, base)
