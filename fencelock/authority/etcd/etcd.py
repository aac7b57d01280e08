"""The class `Etcd`: its requests and the answers. `line.py` explains lines, entries, marks and bases."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

from fencelock._generators import Steps
from fencelock.authority.base import Grant, Wish
from fencelock.authority.etcd import messages
from fencelock.authority.etcd.asking import Asking, Watching
from fencelock.authority.etcd.messages import KeyValue, Txn
from fencelock.authority.line.entries import Head, Mark, Place, View, entry_text, quoted, tokens_of_age
from fencelock.authority.line.line import ANSWER, AsyncLine
from fencelock.errors import AuthorityError

#: etcd allows 128 operations in a transaction; an acquisition has three for each resource, and a few more.
_MOST: Final = 40
_SHORTEST: Final = 2  # seconds of the shortest lease of etcd
#: Characters at the beginning of a nonce, which name its entries; the rest is its first lease.
_NAME: Final = 16
_PAGE: Final = 500  # the most keys in one answer
_REMEMBERED: Final = 10_000  # resources whose last marks a client remembers
_LEASE_IS_THERE: Final = "lease already exists"


class Etcd(Asking):
    """Grants leases in etcd 3.4 or later, and mints their fencing tokens.

    ```python
    authority = Etcd("etcd://e1:2379,e2:2379,e3:2379")
    authority.init()                             # raises an error if the servers cannot be used
    with authority.lock("order:1") as token:
        authority.inspect("order:1")             # its token, its holder, the seconds left
    authority.force_release("order:1")           # None: it was free
    authority.prune(older_than=86_400)
    authority.close()
    ```

    It connects at the first use: one connection for the threads of a process, and one for each event loop. A
    forked child opens its own connections. Leases of etcd last whole seconds, at least two.

    Args:
        url: `etcd://host1:2379,host2:2379`, or with TLS, login and root
            `etcds://user:password@host:2379/root?ca=ca.pem&cert=client.pem&key=client-key.pem`. All keys
            begin with `/root/`, by default with `/fencelock/`.

    Raises:
        ValueError: for a URL that cannot be understood, and files that are no certificates.
        ImportError: on its import, without `fencelock[etcd]`.
    """

    aio: AsyncLine
    _most = _MOST

    def __init__(self, url: str) -> None:
        super().__init__(url)
        root = f"/{self._members.hosts.root}/".encode()
        self._lines, self._marks, self._base_key = root + b"l/", root + b"m/", root + b"b"
        self.aio = AsyncLine(self)  # the same authority for coroutines

    def _start_over(self) -> None:
        super()._start_over()
        #: The last marks and base read. etcd refuses a transaction if the base has changed, or if a mark is
        #: not below the new token.
        self._known: OrderedDict[str, Mark] = OrderedDict()
        self._base = 0
        self._leases: dict[str, tuple[int, ...]] = {}  # the leases that entries may be under, by nonce
        self._client = secrets.randbits(32)
        self._shortest: float = _SHORTEST  # seconds of the shortest lease; the election timeout may raise it
        self._numbers = itertools.count()
        self._free_names: list[str] = []  # names of deleted entries, to be used again

    def _ends_late(self, ttl: float) -> bool:
        return ttl < self._shortest or ttl % 1 > 0

    def _line(self, resource: str) -> bytes:
        return self._lines + quoted(resource).encode() + b"/"

    def _mark(self, resource: str) -> bytes:
        return self._marks + quoted(resource).encode()

    def _entries(self, place: Place) -> list[bytes]:
        return [self._line(resource) + place.nonce[:_NAME].encode() for resource in place.resources]

    def _new_nonce(self) -> str:
        """Return a nonce: the name of the entries, and the lease under which they are put first."""
        # Use names again: until a compaction, etcd keeps deleted keys, and visits all of them to read a line.
        try:
            name = self._free_names.pop()
        except IndexError:
            name = f"{self._client:08x}{next(self._numbers):08x}"
        nonce = name + super()._new_nonce()
        self._leases[nonce] = (_first_lease(nonce),)
        return nonce

    @staticmethod
    def _text(nonce: str, ttl: float) -> bytes:
        return f"{nonce[_NAME:]} {entry_text(ttl)}".encode()

    def _enter(self, place: Place, *, alone: bool, until: float) -> Steps[tuple[int, ...] | View]:
        lease = _first_lease(place.nonce)
        if not place.granted:  # otherwise an earlier try has made the lease
            place.began = time.monotonic()
            place.granted = yield from self._granted(lease, place.ttl, until)
        tokens, compares, marks = self._minting(place)
        compares += [_is_empty(self._line(resource)) for resource in place.resources]
        text = self._text(place.nonce, place.ttl)
        entries = [messages.put(key, text, lease) for key in self._entries(place)]
        # A repeated call must not put the entries back under a lease that they have left meanwhile.
        absent = messages.compare(self._entries(place)[0], messages.VERSION, messages.EQUAL, 0)
        first = [] if alone else [messages.nested([absent], entries)]
        then, otherwise = [*entries, *marks], [*first, *self._look(place)]
        (answer,) = yield from self.asking([messages.txn(compares, then, otherwise)], until)
        if answer.finds_no_lease:  # the lease has ended, so the caller enters again
            place.granted = 0.0
            return View(is_there=False, ahead=())
        done = Txn.read(self.checked(answer), len(then), len(otherwise))
        place.seen = done.revision
        if done.succeeded:
            place.revision = done.revision
            return self._noted(place, tokens)
        view = self._seen(place, done.found[len(first) :])
        if view.is_there and place.revision != done.revision:  # an earlier try of this call has entered
            return (yield from self._take(place, extend=False, until=until))
        return view

    def _take(self, place: Place, *, extend: bool, until: float) -> Steps[tuple[int, ...] | View]:
        tokens, compares, marks = self._minting(place)
        mine, lease = self._entries(place)[0], self._leases_of(place.nonce)[0]
        compares.append(messages.compare(mine, messages.LEASE, messages.EQUAL, lease))
        if not place.holds:  # a late request may have put the entry again, behind other entries
            compares.append(messages.compare(mine, messages.CREATE, messages.EQUAL, place.revision))
            compares += [_is_empty(self._line(each), before=place.revision) for each in place.resources]
        began = time.monotonic()
        look = self._look(place)
        calls = [messages.txn(compares, marks, look)]
        if extend:
            calls.append(messages.keep_alive(self._leases_of(place.nonce)[:1]))
        answers = yield from self.asking(calls, until)
        done = Txn.read(self.checked(answers[0]), len(marks), len(look))
        place.seen = done.revision
        if extend:
            extended = answers[1].messages
            place.began = began
            place.granted = float(messages.lease_and_ttl(extended[0])[1]) if extended else 0.0
            if place.granted <= 0:
                if (yield from self._finds_lease(place.resources[0], place.nonce)):
                    return (yield from self._take(place, extend=True, until=until))
                return View(is_there=False, ahead=())
        return self._noted(place, tokens) if done.succeeded else self._seen(place, done.found)

    def _granted(self, lease: int, ttl: float, until: float) -> Steps[float]:
        """Make a lease of etcd; return its seconds."""
        asked = max(_SHORTEST, math.ceil(ttl))
        (answer,) = yield from self.asking([messages.grant(lease, asked)], until)
        if _LEASE_IS_THERE in answer.detail:
            return float(asked)  # the call was repeated
        seconds = float(messages.lease_and_ttl(self.checked(answer))[1])
        if seconds > asked:
            self._shortest = max(self._shortest, seconds)
        return seconds

    def _minting(self, place: Place) -> tuple[list[int], list[bytes], list[bytes]]:
        """Return new tokens, and the comparisons and operations by which a transaction mints them."""
        compares = [self._base_is(self._base)]
        tokens, puts = [], []
        for resource in place.resources:
            known, key = self._known.get(resource, Mark()), self._mark(resource)
            tokens.append(token := self._minted(known, self._base))
            puts.append(messages.put(key, str(Mark(token, place.nonce)).encode()))
            if known.token:
                compares.append(messages.compare(key, messages.VALUE, messages.LESS, b"%020d" % token))
            else:
                compares.append(messages.compare(key, messages.VERSION, messages.EQUAL, 0))
        return tokens, compares, puts

    def _base_is(self, base: int) -> bytes:
        if base:
            return messages.compare(self._base_key, messages.VALUE, messages.EQUAL, b"%020d" % base)
        return messages.compare(self._base_key, messages.VERSION, messages.EQUAL, 0)

    def _look(self, place: Place) -> list[bytes]:
        """Return the operations whose results `_seen` reads."""
        reads = [messages.get(self._entries(place)[0]), messages.get(self._base_key)]
        reads += [messages.get(self._mark(resource)) for resource in place.resources]
        for line in () if place.holds else map(self._line, place.resources):
            # One key more if the revision is unknown, because the place's own entry may be among them.
            limit = 1 if place.revision else 2
            reads.append(messages.latest(line, messages.after(line), limit, before=place.revision))
        return [messages.read(each) for each in reads]

    def _seen(self, place: Place, found: list[list[KeyValue]]) -> View:
        own, base, *rest = found
        self._base = self._read_base(base)
        for resource, marks in zip(place.resources, rest, strict=False):
            mark = self.read_mark(marks[0].value, marks[0].key) if marks else Mark()
            self._remember(resource, mark)
        is_there = bool(own) and own[0].value.startswith(place.nonce[_NAME:].encode())
        place.revision = own[0].created if is_there else 0
        lines = rest[len(place.resources) :]
        others = (
            [each.key for each in line if each.key != mine or not is_there]
            for line, mine in zip(lines, self._entries(place), strict=False)
        )
        ahead = [keys[0] for keys in others if keys]
        return View(is_there=is_there, ahead=ahead)

    def _read_base(self, found: list[KeyValue]) -> int:
        return self.read_mark(found[0].value, found[0].key).token if found else 0

    def _noted(self, place: Place, tokens: list[int]) -> tuple[int, ...]:
        for resource, token in zip(place.resources, tokens, strict=True):
            self._remember(resource, Mark(token, place.nonce))
        return tuple(tokens)

    def _remember(self, resource: str, mark: Mark) -> None:
        self._known.pop(resource, None)  # so that it becomes the latest; another thread may do the same
        self._known[resource] = mark
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _watch(self, place: Place, ahead: Any) -> Steps[Any]:
        call = messages.watch(ahead, place.seen + 1)  # an earlier revision may be compacted
        try:
            return (yield Watching(call))
        except OSError:  # the connection is lost, so the caller checks again on another one
            return None

    def _lasting(self, wishes: Sequence[Wish], until: float) -> Steps[list[float | AuthorityError]]:
        for grant, ttl in wishes:
            if len(self._leases_of(grant.proof)) > 1:  # an unanswered move has left two possible leases
                yield from self._moving(grant, ttl, until)
        leases = [self._leases_of(grant.proof)[0] for grant, _ in wishes]
        (answer,) = yield from self.asking([messages.keep_alive(leases)], until)
        self.checked(answer)
        found = dict(map(messages.lease_and_ttl, answer.messages))
        lasts: list[float | AuthorityError] = []
        for (grant, ttl), lease in zip(wishes, leases, strict=True):
            seconds = float(max(0, found.get(lease, 0)))
            try:
                if not seconds and (yield from self._finds_lease(grant.resources[0], grant.proof)):
                    lasts += yield from self._lasting([(grant, ttl)], until)
                    continue
                if 0 < seconds < ttl:
                    seconds = yield from self._moving(grant, ttl, until)
            except AuthorityError as error:  # the others last all the same
                lasts.append(error)
            else:
                lasts.append(seconds)
        return lasts

    def _moving(self, grant: Grant, ttl: float, until: float) -> Steps[float]:
        """Put the entries of a grant under another lease; return its seconds, or 0 if they cannot be moved.

        If etcd does not answer, both leases are remembered, and the same move is repeated: the request may
        arrive late.
        """
        old, *pending = self._leases_of(grant.proof)
        new = pending[0] if pending else secrets.randbits(63) or 1
        self._leases[grant.proof] = old, new
        seconds = yield from self._granted(new, ttl, until)
        entries = self._entries(Place(grant.resources, grant.proof, ttl))
        text = self._text(grant.proof, ttl)
        under_old = [messages.compare(each, messages.LEASE, messages.EQUAL, old) for each in entries]
        puts = [messages.put(each, text, new) for each in entries]
        txn = messages.txn(under_old, puts, [messages.read(messages.get(entries[0]))])
        (answer,) = yield from self.asking([txn], until)
        done = Txn.read(self.checked(answer), len(puts), 1)
        found = done.found[0][0].lease if not done.succeeded and done.found[0] else 0
        moved = done.succeeded or found == new
        yield from self.asking([messages.revoke(old if moved else new)], until)
        self._leases[grant.proof] = (new if moved else found or old,)
        return seconds if moved else 0.0

    def _keeping(self, grant: Grant, until: float) -> Steps[bool]:
        seconds = max(until - time.monotonic(), 0.0)
        kept = yield from self._moving(grant, seconds, time.monotonic() + ANSWER[0])
        if kept > 0:
            self._end_at(grant, until)
        return bool(kept > 0)

    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        again: list[str] = []
        now = time.monotonic()
        until = min(ends, now + ANSWER[0]) if ends > now else now + 1.0
        while True:
            calls = [messages.revoke(lease) for lease in self._leases_of(nonce)]
            answers = yield from self.asking(calls, until, again)
            revoked = [answer for answer in answers if not answer.finds_no_lease]
            if any(map(self.checked, revoked)):
                if nonce in self._leases and nonce.startswith(f"{self._client:08x}"):
                    self._free_names.append(nonce[:_NAME])
                self._forget(nonce)
                return True
            if not (yield from self._finds_lease(resources[0], nonce)):
                self._forget(nonce)
                return None if again else False

    def _leave(self, nonce: str) -> None:
        super()._leave(nonce)
        self._leases.pop(nonce, None)

    def _forget(self, nonce: str) -> None:
        self._leases.pop(nonce, None)
        self._due.pop(nonce, None)

    def _leases_of(self, nonce: str) -> tuple[int, ...]:
        return self._leases.get(nonce) or (_first_lease(nonce),)

    def _finds_lease(self, resource: str, nonce: str) -> Steps[bool]:
        """Read the lease of an entry from etcd; return whether that changed `_leases`."""
        key = self._line(resource) + nonce[:_NAME].encode()
        (found, _), *_ = yield from self._ranges([messages.get(key)])
        is_there = bool(found) and found[0].value.startswith(nonce[_NAME:].encode())
        if not is_there or self._leases_of(nonce) == (found[0].lease,):
            return False
        self._leases[nonce] = (found[0].lease,)
        return True

    def _ranges(self, requests: Sequence[bytes]) -> Steps[list[tuple[list[KeyValue], int]]]:
        answers = yield from self.all_of(map(messages.range_call, requests))
        return [messages.found_by(self.checked(answer)) for answer in answers]

    def _heads(self, resources: tuple[str, ...]) -> Steps[list[Head]]:
        names = resources or (yield from self._names())
        ranges = [messages.earliest(line, messages.after(line)) for line in map(self._line, names)]
        found = yield from self._ranges(ranges)
        heads = [(name, keys[0], count) for name, (keys, count) in zip(names, found, strict=True) if keys]
        marks = yield from self._ranges([messages.get(self._mark(name)) for name, _, _ in heads])
        ends = yield from self.all_of(messages.time_to_live(entry.lease) for _, entry, _ in heads)
        return [
            Head(
                resource=name,
                key=entry.key,
                nonce=(entry.key.rpartition(b"/")[2] + entry.value[:_NAME]).decode("ascii", "replace"),
                text=entry.value[_NAME + 1 :].decode("utf-8", "replace"),
                mark=self.read_mark(mark[0].value, mark[0].key) if mark else Mark(),
                waiters=count - 1,
                left=messages.lease_and_ttl(self.checked(end))[1] + 1.0,  # etcd tells whole seconds
                lease=entry.lease,
            )
            for (name, entry, count), (mark, _), end in zip(heads, marks, ends, strict=True)
        ]

    def _names(self) -> Steps[tuple[str, ...]]:
        """Return the resources whose lines have entries."""
        names: dict[str, None] = {}
        for entry in (yield from self._everything(self._lines)):
            names[unquote(entry.key[len(self._lines) :].partition(b"/")[0].decode("utf-8", "replace"))] = None
        return tuple(names)

    def _everything(self, prefix: bytes) -> Steps[list[KeyValue]]:
        everything: list[KeyValue] = []
        start, end, count = prefix, messages.after(prefix), 1
        while count:
            ((found, count),) = yield from self._ranges([messages.page(start, end, _PAGE)])
            everything += found
            count -= len(found)
            start = found[-1].key + b"\0" if found else end
        return everything

    def version(self) -> str:
        """Return the version of a member; raise AuthorityError if none answers."""
        return self.run(self._version_gen())

    def _version_gen(self) -> Steps[str]:
        (answer,) = yield from self.all_of([messages.status()])
        return messages.version_of(self.checked(answer))

    def _evict(self, head: Head) -> Steps[None]:
        (answer,) = yield from self.all_of([messages.revoke(head.lease)])
        if not answer.finds_no_lease:
            self.checked(answer)

    def _raise_base(self, least: int) -> Steps[None]:
        while True:
            ((found, _),) = yield from self._ranges([messages.get(self._base_key)])
            self._base = self._read_base(found)
            if least <= self._base:
                return
            raising = messages.txn(
                [self._base_is(self._base)], [messages.put(self._base_key, b"%020d" % least)]
            )
            (answer,) = yield from self.all_of([raising])
            self.checked(answer)

    def pruning(self, older_than: float) -> Steps[int]:
        yield from self._raise_base(0)
        old = tokens_of_age(self._base, older_than)
        calls = []
        for each in (yield from self._everything(self._marks)):
            if self.read_mark(each.value, each.key).token in old:
                unchanged = messages.compare(each.key, messages.VALUE, messages.EQUAL, each.value)
                line = self._lines + each.key[len(self._marks) :] + b"/"
                calls.append(messages.txn([unchanged, _is_empty(line)], [messages.delete(each.key)]))
        answers = yield from self.all_of(calls)
        return sum(Txn.read(self.checked(answer), 1, 0).succeeded for answer in answers)


def _first_lease(nonce: str) -> int:
    return int(nonce[_NAME:], 16)


def _is_empty(line: bytes, *, before: int = 1) -> bytes:
    """Return the comparison that a line is empty; with `before`, that no entry is of an earlier revision."""
    if before > 1:
        return messages.compare(line, messages.CREATE, messages.GREATER, before - 1, end=messages.after(line))
    return messages.compare(line, messages.CREATE, messages.EQUAL, 0, end=messages.after(line))
