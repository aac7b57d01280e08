"""A node in memory, which answers as the scripts do; `test_conformance.py` holds it to that on a real server.

The model is fast, and its clock stands still until a caller moves it: `now` is the node's own time in
milliseconds. It is the only model of a node that there is. It does *not* have votes that are proven by INFO
(`verify="vote"`), or anything that concerns sockets.

Each rule of the scripts is a method or a class attribute, so that a mutant can do without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, ClassVar, NamedTuple

from fencelock.authority.redlock.protocol.messages import Command, Reply, ReplyKind
from fencelock.tokens import MAX_COUNTER

CLAIM_MS = 100
LONGEST_QUEUE = 1000
QUEUE_MS = 5000
NEAR = 1 << 32

_AMNESIA = Reply(ReplyKind.AMNESIA)
_CONFIG = Reply(ReplyKind.CONFIG)
_CLOSED = Reply(ReplyKind.CLOSED)
_LOST = Reply(ReplyKind.LOST)
_RELEASED = Reply(ReplyKind.RELEASED)
_CONFIRMED = Reply(ReplyKind.CONFIRMED)
_GRANTED = ReplyKind.GRANTED


class Lock(NamedTuple):
    """What a lock key holds. A claim (`>` and a place) has neither epoch nor counter."""

    nonce: str  #: of the grant; of a claim, its whole value
    epoch: int | None
    counter: int | None  #: None where EXTEND has made the lock again
    ends: float  #: when it expires, in ms on the node's clock


@dataclass
class Queue:
    """The waiters of a lock, since when each waits, and when all of that is forgotten."""

    since: dict[str, int]
    ends: float

    def in_order(self) -> list[str]:
        return sorted(self.since, key=lambda place: (self.since[place], place))

    def first(self) -> str:
        return self.in_order()[0]


class QueuePosition(NamedTuple):
    """How a contender behaves towards others, as it goes over the wire."""

    place: str = ""
    waited: int = 0
    since: int = 0
    fair: int = 0
    instead_of: str = ""


_NO_POSITION = QueuePosition()


class Disk(NamedTuple):
    """All that a server keeps, as it was at some moment."""

    hash: dict[str | int, Any]
    locks: dict[str, Lock]
    queues: dict[str, dict[str, int]]


BLANK = Disk({}, {}, {})


class ModelNode:
    """A server process with its data; blank until it is opened. Time passes only by `now`.

    Its tickets begin with its `name`, so that no two nodes make the same.
    """

    #: Whether a vote depends on the marker being that of this very process.
    asks_for_run: ClassVar[bool] = True
    #: Whether it also depends on the memory's being that of the admission.
    asks_for_memory: ClassVar[bool] = True
    #: What EXTEND says where it has made a lock again: not that it was extended.
    after_making_again: ClassVar[int] = 1

    def __init__(self, name: str = "n") -> None:
        self.name = name
        self.run = 1  #: which of this server's processes it is
        self.now = 0.0  #: its clock, in ms
        self.exhausted = False  #: whether it has ever had no counter left
        self.hash: dict[str | int, Any] = {}  #: numbers as keys are stripes, with their counters
        self.locks: dict[str, Lock] = {}  #: an ended lock may still be in it
        self.queues: dict[str, Queue] = {}
        #: By lock, the clients that were called and have not been heard of since.
        self.silent: dict[str, set[str]] = {}
        #: Is told client and message of each call, and tells whether any client heard it.
        self.publish: Callable[[str, str], bool] = lambda _client, _message: False
        self.unbroken = False  #: whether it has loaded no data since it got its ticket, or was admitted
        self.ever = 0  #: 1 + the highest epoch in which it could vote, whatever it remembers of that
        self.again = False  #: whether it could vote twice in one epoch, having forgotten the first time
        self.out = False  #: whether it has lost memory, and not been admitted since
        self._tickets = 0
        self._scripts: dict[str, Callable[[Command], Reply]] = {
            "acquire": self.acquire,
            "confirm": self.confirm,
            "release": self.release,
            "extend": self.extend,
            "holder": self.holder,
            "begin": _spread(self.begin),
            "read": lambda _: self.read(),
            "promise": _spread(self.promise),
            "raise": _spread(self.raise_),
            "admit": _spread(self.admit),
            "close": _spread(self.close),
            "open": _spread(self.open),
            "leases": lambda _: self.leases(),
            "sync": lambda _: Reply(ReplyKind.ON_DISK),
        }

    def execute(self, command: Command) -> Reply:
        return self._scripts[command.script](command)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds * 1000

    # What happens to a server.

    def remember(self) -> Disk:
        """Return all that it keeps, as a file on its disk would have it."""
        queues = {
            key: dict(queue.since) for key in list(self.queues) if (queue := self._queue(key)) is not None
        }
        return Disk(dict(self.hash), dict(self.locks), queues)

    def flush(self) -> None:
        self._load(BLANK)

    def restart(self, disk: Disk | None = None) -> None:
        """Come back as another process: with all data, or with those of an earlier moment."""
        self.run += 1
        self.unbroken = False
        if disk is not None:
            self._load(disk)

    def reload(self, disk: Disk) -> None:
        """Take the data of an earlier moment, as a node does that follows another; the process lives on."""
        self._load(disk)

    def _load(self, disk: Disk) -> None:
        self.unbroken = False
        self.hash, self.locks = dict(disk.hash), dict(disk.locks)
        self.silent = {}
        self.queues = {key: Queue(dict(since), self.now + QUEUE_MS) for key, since in disk.queues.items()}

    def expire(self, key: str) -> None:
        self.locks.pop(key, None)

    # What it is.

    @property
    def blank(self) -> bool:
        return "e" not in self.hash

    @property
    def admitted(self) -> bool:
        """Whether it has its marker, and it is this process's."""
        return "e" in self.hash and self.is_the_same

    @property
    def is_the_same(self) -> bool:
        """Whether it was admitted as this very process, and has loaded nothing since."""
        return bool(self.hash.get("r") == self.run) and (self.unbroken or not self.asks_for_memory)

    @property
    def has_ticket(self) -> bool:
        """The same of the ticket that is there."""
        mine = self.hash.get("ticket_of") == self.run
        return mine and (self.unbroken or not self.asks_for_memory)

    def votes_in(self, fingerprint: str) -> bool:
        return self.admitted and "next" not in self.hash and bool(self.hash["cfg"] == fingerprint)

    def refusal(self, fingerprint: str) -> Reply | None:
        """Return why it must not vote, if that is so."""
        fields = self.hash
        if "e" not in fields:
            return self.when_blank(fingerprint)
        if self.asks_for_run and not self.is_the_same:
            return Reply(ReplyKind.RESTARTED, ttl=self.ms_out() / 1000 if self.has_ticket else math.inf)
        if fields["cfg"] != fingerprint:
            return _CONFIG
        return _CLOSED if "next" in fields else None

    def when_blank(self, fingerprint: str) -> Reply | None:  # noqa: ARG002 - a mutant makes itself a marker
        """Return what a blank node says."""
        return _AMNESIA

    def lock(self, key: str) -> Lock | None:
        """Return what a lock key holds; None where it has expired."""
        lock = self.locks.get(key)
        if lock is not None and lock.ends <= self.now:
            del self.locks[key]
            return None
        return lock

    def counter(self, stripe: int) -> int:
        counter: int = self.hash.get(stripe, self.hash.get("b", 0))
        return counter

    def catch_up(self, stripe: int, decided: int) -> bool:
        """Raise a counter; return False for a number that no grants explain."""
        last = self.counter(stripe)
        if decided > last:
            if not self.is_near(decided, last):
                return False
            self.hash[stripe] = decided
        return True

    # The scripts about locks.

    def acquire(self, command: Command) -> Reply:
        """ACQUIRE, and REMINT: grant all the locks, or none."""
        arguments: Sequence[Any] = command.arguments
        refused = self.refusal(arguments[0])
        if refused is not None:
            return refused
        keys = command.keys[1:]
        count = 4 + 2 * len(keys)
        position = QueuePosition(*arguments[count:]) if len(arguments) > count else _NO_POSITION
        if position.place:
            self._hear_from(command.keys[1:], position.place)
        found: list[Lock | None] = []
        for key in keys:
            lock = self.lock(key)
            if lock is not None and (
                (position.place and lock.nonce == ">" + position.place)
                or (position.instead_of and lock.nonce == position.instead_of)
            ):
                lock = None
            elif (lock is not None and (lock.nonce != command.nonce or lock.counter is None)) or (
                lock is None and (position.place or position.fair) and self._is_anothers_turn(key, position)
            ):
                return self._held(command, key, position)
            found.append(lock)
        return self._grant(command, keys, found, position)

    def _grant(
        self, command: Command, keys: Sequence[str], found: Sequence[Lock | None], position: QueuePosition
    ) -> Reply:
        arguments: Sequence[Any] = command.arguments
        epoch = self.hash["e"]
        granted: list[int] = []
        counters: dict[str | int, int] = {}
        new = []
        for i, (key, lock) in enumerate(zip(keys, found, strict=True)):
            if lock is not None and lock.epoch == epoch:
                granted.append(lock.counter or 0)  # a resent request gets the answer that it got before
                continue
            stripe, hint = arguments[4 + 2 * i], arguments[5 + 2 * i]
            last = counters[stripe] if stripe in counters else self.counter(stripe)
            counter = self.next_counter(last, hint if arguments[3] == epoch else 0)
            if counter > MAX_COUNTER:
                self.exhausted = True
                return Reply(ReplyKind.FULL)
            counters[stripe] = counter
            granted.append(counter)
            new.append((key, counter))
        self.hash |= counters
        for key, counter in new:
            self.locks[key] = Lock(command.nonce, epoch, counter, self.now + arguments[2])
        if position.place:
            for key in keys:
                self._leave_queue(key, position.place)
        return Reply(_GRANTED, epoch, tuple(granted))

    def next_counter(self, last: int, hint: int) -> int:
        return max(last + 1, hint if self.is_near(hint, last) else 0)

    def is_near(self, number: int, last: int) -> bool:
        return number - last <= NEAR

    def confirm(self, command: Command) -> Reply:
        arguments: Sequence[Any] = command.arguments
        refused = self.refusal(arguments[0])
        if refused is not None:
            return refused
        if self.asks_for_epoch(arguments[2]):
            return Reply(ReplyKind.EPOCH)
        locks = [self.lock(key) for key in command.keys[1:]]
        if not all(self.is_ours(lock, command.nonce) for lock in locks):
            return _LOST
        counters = tuple(0 if lock is None else lock.counter or 0 for lock in locks)
        if self.is_higher(counters, arguments[4::2]):
            return Reply(ReplyKind.HIGHER, self.hash["e"], counters)
        pairs = zip(arguments[3::2], arguments[4::2], strict=True)
        return _CONFIRMED if all(self.catch_up(*pair) for pair in pairs) else _LOST

    def asks_for_epoch(self, epoch: int) -> bool:
        return bool(epoch != self.hash["e"])

    def is_ours(self, lock: Lock | None, nonce: str) -> bool:
        return (
            lock is not None
            and lock.nonce == nonce
            and lock.epoch == self.hash["e"]
            and lock.counter is not None
        )

    def is_higher(self, counters: Sequence[int], decided: Sequence[int]) -> bool:
        """Whether this node had granted more than what was decided."""
        return any(own > theirs for own, theirs in zip(counters, decided, strict=True))

    def release(self, command: Command) -> Reply:
        """RELEASE: refuse no client."""
        arguments: Sequence[Any] = command.arguments
        keys = command.keys[1:]
        count = 3 + 2 * len(keys)
        fields = self.hash
        if fields.get("e") == arguments[2] and fields["cfg"] == arguments[0]:
            found = [self.lock(key) for key in keys]
            ours = [self.may_raise(lock, command.nonce) for lock in found]
            stripes, decided = compress(arguments[3:count:2], ours), compress(arguments[4:count:2], ours)
            self.on_release(tuple(stripes), tuple(decided))
        if len(arguments) > count:
            return self._release_in_line(command, *arguments[count:])
        released = 0
        for key in keys:
            lock = self.lock(key)
            if lock is not None and self.may_release(lock, command.nonce):
                released += 1
                if self.queues:
                    self._pass_on(key)
                else:
                    del self.locks[key]
        return self._released(len(keys) - released)

    def _released(self, left: int) -> Reply:
        if not left:
            return _RELEASED
        return _LOST if "e" in self.hash else _AMNESIA

    def may_raise(self, lock: Lock | None, nonce: str) -> bool:
        return lock is not None and lock.nonce == nonce

    def may_release(self, lock: Lock, nonce: str) -> bool:
        return lock.nonce == nonce

    def on_release(self, stripes: Sequence[int], decided: Sequence[int]) -> None:
        """Let counters that lag behind catch up."""
        for stripe, value in zip(stripes, decided, strict=True):
            self.catch_up(stripe, value)

    def _release_in_line(self, command: Command, place: str, *waiting: int) -> Reply:
        keys = command.keys[1:]
        self._hear_from(keys, place)
        if waiting and "e" in self.hash:
            self._line_up(keys[0], place, *waiting)
        released = 0
        for key in keys:
            lock = self.lock(key)
            if not waiting:
                self._leave_queue(key, place)
            if lock is not None and self.may_release(lock, command.nonce):
                self._pass_on(key)
                released += 1
            elif not waiting and lock is not None and lock.nonce == ">" + place:
                self._pass_on(key)
        return self._released(len(keys) - released)

    def extend(self, command: Command) -> Reply:
        arguments: Sequence[Any] = command.arguments
        refused = self.refusal(arguments[0])
        if refused is not None and not self.makes_locks(refused, arguments[0]):
            return refused
        codes, start = [], 1
        for at in range(2, len(arguments), 4):
            nonce, ttl, count, value = arguments[at : at + 4]
            codes.append(self._extend(command.keys[start : start + count], nonce, ttl, value))
            start += count
        return refused or Reply(ReplyKind.EXTENDED, self.hash["e"], tuple(codes))

    def holder(self, command: Command) -> Reply:
        if (refused := self.refusal(str(command.arguments[0]))) is not None:
            return refused
        locks = [lock for key in command.keys[1:] if (lock := self.lock(key)) is not None]
        left = [lock.ends - self.now for lock in locks if not _is_claim(lock, "")]
        return Reply(ReplyKind.HELD, ttl=max(left) / 1000) if left else Reply(ReplyKind.LOST)

    def makes_locks(self, refused: Reply, fingerprint: str) -> bool:
        """Whether it does not vote, but may be admitted to this list."""
        restarted = refused.kind is ReplyKind.RESTARTED and self.hash["cfg"] == fingerprint
        return refused.kind is ReplyKind.AMNESIA or (restarted and "next" not in self.hash)

    def _extend(self, keys: Sequence[str], nonce: str, ttl: int, value: str) -> int:
        ends = self.now + abs(ttl)
        locks = {key: self.lock(key) for key in keys}
        missing = [key for key, lock in locks.items() if lock is None or _is_claim(lock, nonce)]
        if any(lock is not None and lock.nonce != nonce for key, lock in locks.items() if key not in missing):
            return 0
        for key, lock in locks.items():
            if key in missing:
                self.locks[key] = self.made_again(nonce, value, ends)
            elif lock is not None and (ttl < 0 or lock.ends < ends):
                self.locks[key] = lock._replace(ends=ends)
        return self.after_making_again if missing else 2

    def made_again(self, nonce: str, value: str, ends: float) -> Lock:
        """Return what EXTEND writes where a lock is missing: no CONFIRM accepts it."""
        return Lock(nonce, int(value.split("|")[1]), None, ends)

    # Waiting in line: hints, which can make the node say HELD and never more than that.

    def _held(self, command: Command, key: str, position: QueuePosition) -> Reply:
        lock = self.lock(key)
        left = -0.002 if lock is None else (lock.ends - self.now) / 1000
        if position.place:
            for each in command.keys[1:]:
                claim = self.lock(each)
                if claim is not None and claim.nonce == ">" + position.place:
                    self._pass_on(each)
            self._line_up(key, position.place, position.waited, position.since)
        return Reply(ReplyKind.HELD, ttl=left)

    def _is_anothers_turn(self, key: str, position: QueuePosition) -> bool:
        queue = self._queue(key)
        if queue is None:
            return False
        if position.place:
            self._line_up(key, position.place, position.waited, position.since)
            if queue.first() == position.place:
                return False
        called = self._call_next(key)
        return called not in {"", position.place}

    def _queue(self, key: str) -> Queue | None:
        queue = self.queues.get(key)
        if queue is not None and (not queue.since or queue.ends <= self.now):
            del self.queues[key]
            return None
        return queue

    def _line_up(self, key: str, place: str, waited: int, since: int) -> None:
        queue = self._queue(key)
        if queue is None:
            queue = self.queues[key] = Queue({}, 0.0)
        queue.ends = self.now + QUEUE_MS
        arrived = int(self.now) - waited
        if abs(since - arrived) <= 1000:
            arrived = since
        queue.since.setdefault(place, arrived)
        if len(queue.since) > LONGEST_QUEUE:
            del queue.since[max(queue.since, key=lambda each: (queue.since[each], each))]

    def _hear_from(self, keys: Sequence[str], place: str) -> None:
        for key in keys:
            self.silent.get(key, set()).discard(place.partition(".")[0])

    def _leave_queue(self, key: str, place: str) -> None:
        queue = self._queue(key)
        if queue is not None:
            queue.since.pop(place, None)

    def _pass_on(self, key: str) -> None:
        if not self._call_next(key):
            self.locks.pop(key, None)

    def _call_next(self, key: str) -> str:
        silent, queue = self.silent.setdefault(key, set()), self._queue(key)
        if queue is None:
            return ""
        for place in queue.in_order():
            client, _, number = place.partition(".")
            if client in silent:
                continue
            del queue.since[place]
            if self.publish(client, number):
                silent.add(client)
                self.locks[key] = Lock(">" + place, None, None, self.now + CLAIM_MS)
                return place
        return ""

    # The scripts about members.

    def holds(self, ticket: str) -> bool:
        """Whether that is its ticket, of this very process and memory."""
        return bool(ticket) and bool(self.hash.get("ticket") == ticket) and self.has_ticket

    def new_ticket(self, word: str) -> str:  # noqa: ARG002 - a mutant leaves the ticket to the client
        """Return a ticket that was never there before."""
        self._tickets += 1
        return f"{self.name}t{self._tickets}"

    def _facts(self) -> tuple[str, ...]:
        return self.hash["id"], self.hash["members"]

    def begin(self, _cfg: str, word: str, max_ttl: int, seat: str) -> Reply:
        fields = self.hash
        if self.admitted:
            return Reply(ReplyKind.ADMITTED, facts=self._facts())
        if "next" in fields:
            return _CLOSED
        if "e" in fields and not seat:
            return Reply(ReplyKind.ADMITTED, facts=self._facts())
        if "e" in fields and fields["id"] != seat:
            return _CONFIG
        if not self.has_ticket:
            self.unbroken = True
            fields.pop("r", None)
            fields |= {
                "ticket": self.new_ticket(word),
                "ticket_of": self.run,
                "ticket_at": int(self.now),
                "ticket_ttl": max_ttl,
            }
        elif int(self.now) < fields["ticket_at"]:
            fields["ticket_at"] = int(self.now)
        return Reply(
            ReplyKind.TICKET, facts=(fields["ticket"], str(fields["ticket_ttl"]), str(self.ms_out()))
        )

    def ms_out(self) -> int:
        """Return for how many ms it still stays out, by its ticket."""
        at: int = self.hash["ticket_at"]
        ttl: int = self.hash["ticket_ttl"]
        return max(0, min(ttl, at + ttl - int(self.now)))

    def read(self) -> Reply:
        fields = self.hash
        names = (fields.get(name, "") for name in ("id", "members"))
        told = (fields.get(name, "") for name in ("e", "p", "cfg", "next", "next_members"))
        ticket = ("", "")
        if self.has_ticket:
            ticket = (fields["ticket"], str(self.ms_out()))
        return Reply(
            ReplyKind.STANDING, facts=(*names, "1" if self.admitted else "", *map(str, told), *ticket)
        )

    def promise(self, cfg: str, epoch: int, ticket: str, mode: str) -> Reply:
        closed = self.hash.get("next")
        if self.admitted:
            counts = (self.hash["cfg"] == cfg and not closed) or (mode == "change" and closed == cfg)
        else:
            counts = self.holds(ticket) and not closed and self.hash.get("cfg", cfg) == cfg
        if not counts:
            return Reply(ReplyKind.NO_TICKET) if ticket else self.refusal(cfg) or _CONFIG
        if epoch > self.hash.get("p", 0):
            self.keep_promise(epoch)
        return Reply(ReplyKind.PROMISED)

    def keep_promise(self, epoch: int) -> None:
        """Answer for no lower epoch as the highest from now on."""
        self.hash["p"] = epoch

    def raise_(self, cfg: str, epoch: int) -> Reply:
        refused = self.refusal(cfg)
        if refused is None and epoch > self.hash["e"]:
            self.hash = {field: value for field, value in self.hash.items() if not isinstance(field, int)}
            self.hash |= {"e": epoch, "p": max(self.hash["p"], epoch), "b": 0}
            self.ever = max(self.ever, epoch + 1)
        return refused or Reply(ReplyKind.RAISED)

    def admit(self, cfg: str, epoch: int, ticket: str, seat: str, members: str) -> Reply:
        if self.admitted:
            return Reply(ReplyKind.ADMITTED, facts=self._facts())
        if "next" in self.hash:
            return _CLOSED
        if not self.holds(ticket):
            return Reply(ReplyKind.NO_TICKET)
        if left := self.ms_out():
            return Reply(ReplyKind.EARLY, ttl=left / 1000)
        self._let_vote(cfg, epoch, seat, 0, members)
        return Reply(ReplyKind.ADMITTED, facts=self._facts())

    def close(self, cfg: str, following: str, members: str) -> Reply:
        refused = self.refusal(cfg)
        if refused is _CLOSED and self.may_close(following):
            refused = None
        if refused is None:
            self.hash |= {"next": following, "next_members": members}
        return refused or Reply(ReplyKind.SHUT)

    def may_close(self, following: str) -> bool:
        """Whether a node that is closed already lets itself be closed for this list."""
        return bool(self.hash["next"] == following)

    def open(self, cfg: str, epoch: int, node_id: str, base: int, members: str) -> Reply:
        awaits = self.admitted and self.hash.get("next") == cfg
        if "e" in self.hash and not awaits:
            return Reply(ReplyKind.ADMITTED, facts=self._facts())
        if not awaits and not self.holds(node_id):
            return Reply(ReplyKind.NO_TICKET)
        self._let_vote(cfg, epoch, node_id, base, members)
        return Reply(ReplyKind.OPENED, facts=self._facts())

    def _let_vote(self, cfg: str, epoch: int, node_id: str, base: int, members: str) -> None:
        self.hash = {
            "e": epoch,
            "p": self.promise_to_keep(epoch),
            "r": self.run,
            "cfg": cfg,
            "id": node_id,
            "members": members,
            "b": base,
        }
        self.again |= epoch < self.ever
        self.ever = max(self.ever, epoch + 1)
        self.out = False

    def promise_to_keep(self, epoch: int) -> int:
        """Return what a node that is admitted or opened has promised: never less than before."""
        promised: int = max(self.hash.get("p", 0), epoch)
        return promised

    def leases(self) -> Reply:
        """LEASES: all of them at once."""
        longest = max((lock.ends - self.now for lock in self.locks.values()), default=0.0)
        return Reply(ReplyKind.LEASES, facts=("0", str(int(max(0.0, longest)))))


def _spread(script: Callable[..., Reply]) -> Callable[[Command], Reply]:
    """Return a script that has its arguments one by one, as one that has the command."""
    return lambda command: script(*command.arguments)


def _is_claim(lock: Lock, nonce: str) -> bool:
    return lock.epoch is None and lock.nonce != nonce and lock.nonce.startswith(">")
