"""The class `ZooKeeper`: its requests and the answers. `line.py` explains lines, entries, marks and bases."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from kazoo.exceptions import NodeExistsError, NoNodeError

from fencelock._checks import check_seconds
from fencelock._generators import Steps
from fencelock.authority.base import Grant, Wish
from fencelock.authority.hosts import tls_of
from fencelock.authority.line.entries import Exchange, Mark, Place, View, entry_text
from fencelock.authority.line.line import ANSWER, AsyncLine
from fencelock.authority.loops import LoopWakeup, ThreadWakeup
from fencelock.authority.zookeeper import verbs
from fencelock.authority.zookeeper.nodes import Nodes
from fencelock.authority.zookeeper.session import Request, Session, Watching, hosts_of
from fencelock.errors import AuthorityError

_MOST: Final = 500  # the most names of one lock: their transaction must fit into a megabyte
#: A base that is to be read; no node has version -2, and -1 would mean any version.
_UNKNOWN: Final = (0, -2, -1)
_REMEMBERED: Final = 10_000  # the most lines, and the most marks, that a client remembers


class ZooKeeper(Nodes):
    """Grants leases in ZooKeeper, and mints their fencing tokens.

    ```python
    authority = ZooKeeper("zookeeper://z1:2181,z2:2181,z3:2181")
    authority.init()                             # raises an error if the servers cannot be used
    with authority.lock("order:1") as token:
        authority.inspect("order:1")             # its token, its holder, the seconds left
    authority.force_release("order:1")           # None: it was free
    authority.prune(older_than=86_400)
    authority.close()
    ```

    It has one session for the threads and loops of a process, which begins at the first use. A forked child
    has its own session. A lease lasts for two thirds of the session timeout at most; renewal extends it. If
    a process dies, its locks are free when its session has ended, whatever their ttl is.

    Args:
        url: `zookeeper://host1:2181,host2:2181/root`, or with TLS and login
            `zookeepers://user:password@host:2281/root?ca=ca.pem&cert=client.pem&key=client-key.pem`. All
            znodes are below `/root`, by default `/fencelock`.
        session_timeout: seconds to ask for; also in the query of the URL. The servers have limits.

    Raises:
        ValueError, TypeError: for a URL or a session timeout that cannot be used.
        ImportError: on its import, without `fencelock[zookeeper]`.
    """

    aio: AsyncLine
    _patience = 15.0  # the session leaves a silent server, so that only a busy one answers late
    _most = _MOST
    _comes_late = False  # requests of a session are executed in their order

    def _answer_within(self, until: float) -> float:
        return max(ANSWER[1], until - time.monotonic())

    def _ends_late(self, ttl: float) -> bool:  # noqa: ARG002 - an entry ends with the session
        return True

    def __init__(self, url: str, *, session_timeout: float = 30.0) -> None:
        self._hosts, given = hosts_of(url)
        self._tls = tls_of(self._hosts)
        self._timeout = check_seconds("session_timeout", given or session_timeout)
        self._shown = str(self._hosts)
        self._root = f"/{self._hosts.root}"
        self._above = f"{self._root}/l"
        super().__init__()
        self.aio = AsyncLine(self)  # the same authority for coroutines

    def _start_over(self) -> None:
        super()._start_over()
        self._session: Session | None = None
        #: `close` was called, so the session ends when no lease is held. Another use takes this back.
        self._closes = False
        self._opening = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
        self._made: OrderedDict[str, None] = OrderedDict()  # lines that exist; this only spares a request
        self._paths: dict[str, list[str]] = {}  # the paths of entries, by nonce
        self._ttls: dict[str, float] = {}  # the ttl in the text of entries, by nonce
        self._handed: set[str] = set()  # grants that were handed over to another process
        self._renewals = 0
        #: By line: mark, version of the mark, and `Session.changes` when it was read. They spare a request
        #: on the same connection only, because after a new connection the servers may have lost their data.
        self._known: OrderedDict[str, tuple[Mark, int, int]] = OrderedDict()
        self._base = _UNKNOWN  # the base, its version, and `Session.changes` when it was read

    def close(self) -> None:
        """Close the session; held leases keep it open until they end. The next use connects again."""
        super().close()
        self._closes = True
        self._end_session()

    def _end_session(self) -> bool:
        """End the session and its entries, unless leases are held; return whether it has ended."""
        if any(due.at > time.monotonic() for due in list(self._due.values())):
            return False
        self._due.clear()
        session, self._session = self._session, None
        if session is not None:
            session.close()
        return True

    # Requests.

    def work(self, step: Any) -> Any:
        session = self._opened()
        if isinstance(step, Watching):
            return session.watch(step.path, ThreadWakeup())
        return self.run(session.exchanging(step, ThreadWakeup()))

    async def work_soon(self, step: Any) -> Any:
        session = self._opened()
        if isinstance(step, Watching):
            return session.watch(step.path, LoopWakeup())
        return await self.aio.run(session.exchanging(step, LoopWakeup()))

    def _opened(self) -> Session:
        self._closes = self._closes and self._due.is_at_work
        if (session := self._session) is None:
            with self._opening:
                if (session := self._session) is None:
                    session = self._session = Session(self._hosts, self._timeout, self._tls)
        if session.renewals != self._renewals:
            with self._opening:  # no thread may clear paths that another has noted for the new session
                if session.renewals != self._renewals:  # entries of the earlier session are not ours
                    self._paths.clear()
                    self._renewals = session.renewals
        return session

    # The line.

    def _enter(self, place: Place, *, alone: bool, until: float) -> Steps[tuple[int, ...] | View]:
        lines = list(map(self._line, place.resources))
        if alone:
            found = yield from self.asking([verbs.children(line) for line in lines], until)
            ahead = [name for its in found if not isinstance(its, NoNodeError) for name in self._checked(its)]
            if ahead:
                return View(is_there=False, ahead=ahead)
        while True:
            yield from self._make(lines, until)
            changes = self._opened().changes
            text, place.began = entry_text(place.ttl).encode(), time.monotonic()
            operations = [(verbs.CREATE, f"{line}/{place.nonce}-", text) for line in lines]
            known = [its[:2] for line in lines if (its := self._known.pop(line, None)) and its[2] == changes]
            mints = len(known) == len(lines)
            look = [verbs.children_and_version(line) for line in lines] if mints else self._look(place)
            if mints:
                operations += self._marking(place, known)
            request = verbs.transaction(*operations)
            try:
                made, *seen = yield Exchange([request, *look], self._answer_within(until))
            except OSError as error:
                self._check_time(error, until)
                if (yield from self._finds(place.resources, place.nonce, until)):
                    return (yield from self._take(place, extend=True, until=until))
                continue
            if self._has_changed(made, lines):
                continue
            place.granted = self._lasts(place.ttl)  # first, because `_lasts` may clear `_paths`
            self._paths[place.nonce], self._ttls[place.nonce] = made[: len(lines)], place.ttl
            if not mints:
                return (yield from self._mint_if_first(place, seen, changes, until))
            if self._stands_alone(place, made, seen):
                return self._noted(place, operations, made, changes)
            return (yield from self._take(place, extend=False, until=until))

    def _has_changed(self, made: Any, lines: Sequence[str]) -> bool:
        """Return whether a transaction was refused because another client has minted or pruned."""
        refused = verbs.refusal(made)
        if isinstance(refused, verbs.CHANGED):
            self._base = _UNKNOWN
        if isinstance(refused, NoNodeError):
            for line in lines:
                self._made.pop(line, None)
        return isinstance(refused, verbs.CHANGED) or self._checked(refused) is not None

    def _marking(self, place: Place, known: Sequence[tuple[Mark, int]]) -> list[tuple[Any, ...]]:
        """Return the operations that mint, if marks and base still have the known versions."""
        base = self._base
        operations: list[tuple[Any, ...]] = [(verbs.CHECK, self._above, base[1])]
        for line, (mark, version) in zip(map(self._line, place.resources), known, strict=True):
            minted = Mark(self._minted(mark, base[0]), place.nonce)
            operations.append((verbs.SET, line, str(minted).encode(), version))
        return operations

    def _stands_alone(self, place: Place, made: list[Any], seen: list[Any]) -> bool:
        """Return whether a place that has just minted is the first in all lines, with the latest marks."""
        stats = made[-len(place.resources) :]
        return all(
            its.version == stat.version
            and all(verbs.distance(name, path.rpartition("/")[2]) >= 0 for name in names)
            for path, stat, (names, its) in zip(
                self._paths[place.nonce], stats, map(self._checked, seen), strict=True
            )
        )

    def _noted(
        self, place: Place, operations: Sequence[tuple[Any, ...]], done: Sequence[Any], changes: int
    ) -> tuple[int, ...]:
        """Return the tokens that a transaction has minted; note the versions on this connection, if given."""
        tokens = []
        sets = zip(operations[-len(place.resources) :], done[-len(place.resources) :], strict=True)
        for (_, line, text, _), stat in sets:
            mark = self._mark_of(text, line)
            tokens.append(mark.token)
            if changes:
                self._known[line] = mark, stat.version, changes
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return tuple(tokens)

    def _take(self, place: Place, *, extend: bool, until: float) -> Steps[tuple[int, ...] | View]:  # noqa: ARG002
        # The transaction that mints checks after `began` that the entries are there.
        began, changes = time.monotonic(), self._opened().changes
        seen = yield from self.asking(self._look(place), until)
        place.began, place.granted = began, self._lasts(place.ttl)
        return (yield from self._mint_if_first(place, seen, changes, until))

    def _make(self, lines: Sequence[str], until: float) -> Steps[None]:
        """Make the lines that are not known to exist."""
        missing = [line for line in lines if line not in self._made]
        while missing:
            found = yield from self.asking([verbs.create(line, b"") for line in missing], until)
            if any(isinstance(its, NoNodeError) for its in found):
                (made,) = yield from self.asking([verbs.ensure_path(self._above)], until)
                self._checked(made)
                continue
            for line, its in zip(missing, found, strict=True):
                if not isinstance(its, NodeExistsError):
                    self._checked(its)
                self._made[line] = None
            missing = []
        while len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)

    def _look(self, place: Place) -> list[Request]:
        """Return the requests whose answers `_mint_if_first` reads."""
        lines = list(map(self._line, place.resources))
        base = [] if self._base[2] == self._opened().changes else self._look_at_base()
        return [*map(verbs.children, lines), *map(verbs.get, lines), *base]

    def _mint_if_first(
        self, place: Place, seen: list[Any], changes: int, until: float
    ) -> Steps[tuple[int, ...] | View]:
        """Mint if the place is the first in all lines, and return the tokens; else return a `View`.

        `changes` is `Session.changes` from before `seen` was asked for.
        """
        paths = self._paths.get(place.nonce, [])
        if len(paths) < len(place.resources) or any(isinstance(each, NoNodeError) for each in seen):
            return View(is_there=False, ahead=())
        rest, lines = list(map(self._checked, seen)), list(map(self._line, place.resources))
        found, base = rest[len(lines) : 2 * len(lines)], rest[2 * len(lines) :]
        ahead = []
        for line, names, path in zip(lines, rest, paths, strict=False):
            mine = path.rpartition("/")[2]
            if mine not in names:
                return View(is_there=False, ahead=())
            before = [(apart, name) for name in names if (apart := verbs.distance(name, mine)) < 0]
            if before:
                ahead.append(f"{line}/{max(before)[1]}")
        marks = [self._mark_of(text, line) for (text, _), line in zip(found, lines, strict=True)]
        kept_for = max(mark.kept_for for mark in marks)
        if ahead or kept_for > 0:
            return View(is_there=True, ahead=ahead, kept_for=kept_for)
        if base:
            token, stat = self._base_of(base)
            self._base = token, stat.version, changes
        known = [(mark, stat.version) for mark, (_, stat) in zip(marks, found, strict=True)]
        operations: list[tuple[Any, ...]] = [(verbs.CHECK, path, -1) for path in paths]
        operations += self._marking(place, known)
        (done,) = yield from self.asking([verbs.transaction(*operations)], until)
        if (refused := verbs.refusal(done)) is None:
            # While others wait, a new entry that also mints would only make the next mint fail.
            is_alone = all(len(names) == 1 for names in rest[: len(lines)])
            return self._noted(place, operations, done, changes if is_alone else 0)
        if not isinstance(refused, verbs.CHANGED):
            self._checked(refused)
        self._base = _UNKNOWN
        return View(is_there=True, ahead=())  # something has changed, so the caller tries again

    def _lasts(self, ttl: float) -> float:
        """Return for how many seconds a lease lasts; ValueError if its ttl is longer than the session."""
        timeout = self._opened().timeout
        if ttl > timeout > 0:  # 0 if another thread has closed the session, whose leases are over
            raise ValueError(
                f"a ttl of {ttl:g} s is longer than the session of {timeout:g} s that the servers grant: "
                "use a shorter one, which is renewed while its block lasts, or session_timeout="
            )
        return min(ttl, timeout * 2 / 3)

    def _watch(self, place: Place, ahead: Any) -> Steps[Any]:  # noqa: ARG002 - etcd needs the place
        return (yield Watching(ahead))

    def _lasting(self, wishes: Sequence[Wish], until: float) -> Steps[list[float | AuthorityError]]:
        for grant, _ in wishes:
            if grant.proof not in self._paths:
                yield from self._finds(grant.resources, grant.proof, until)
        paths = [self._paths.get(grant.proof, []) for grant, _ in wishes]
        requests = [verbs.sync(self._root), *(verbs.exists(path) for its in paths for path in its)]
        for (grant, ttl), its in zip(wishes, paths, strict=True):
            if self._ttls.get(grant.proof) != ttl:
                self._lasts(ttl)  # raises ValueError; a session that has shrunk only makes leases shorter
                self._ttls[grant.proof] = ttl
                requests += [verbs.set_data(path, entry_text(ttl).encode()) for path in its]
        synced, *found = yield from self.asking(requests, until)
        self._checked(synced)
        lasts: list[float | AuthorityError] = []
        for (grant, ttl), its in zip(wishes, paths, strict=True):
            stand, found = found[: len(its)], found[len(its) :]
            try:
                stands = len(its) == len(grant.resources) and all(map(self._checked, stand))
            except AuthorityError as error:  # the others last all the same
                lasts.append(error)
                continue
            lasts.append(min(ttl, self._opened().timeout * 2 / 3) if stands else 0.0)
        return lasts

    def _finds(self, resources: tuple[str, ...], nonce: str, until: float) -> Steps[bool]:
        """Search the lines for the entries of a nonce; return whether each line has one."""
        lines = list(map(self._line, resources))
        requests = [verbs.sync(self._root), *map(verbs.children, lines)]
        _, *found = yield from self.asking(requests, until)
        paths = []
        for line, names in zip(lines, found, strict=True):
            if not isinstance(names, NoNodeError):
                paths += [f"{line}/{name}" for name in self._checked(names) if name.startswith(nonce)]
        self._paths[nonce] = paths
        return len(paths) == len(lines)

    def _keeping(self, grant: Grant, until: float) -> Steps[bool]:
        """Note in the marks until when the resources are kept, and delete the entries."""
        kept_until = int((time.time() + until - time.monotonic()) * 1000)
        until = time.monotonic() + ANSWER[0]
        lines = list(map(self._line, grant.resources))
        while True:
            if not (yield from self._finds(grant.resources, grant.proof, until)):
                return False
            paths = self._paths[grant.proof]
            found = yield from self.asking([*map(verbs.get, paths), *map(verbs.get, lines)], until)
            if any(isinstance(its, NoNodeError) for its in found):
                return False
            operations: list[tuple[Any, ...]] = [(verbs.DELETE, path) for path in paths]
            entries, marks = found[: len(paths)], found[len(paths) :]
            for line, (text, _), (mark, stat) in zip(lines, entries, marks, strict=True):
                kept = self._mark_of(mark, line)._replace(
                    kept_until=kept_until, text=text.decode("utf-8", "replace")
                )
                operations.append((verbs.SET, line, str(kept).encode(), stat.version))
            (done,) = yield from self.asking([verbs.transaction(*operations)], until)
            if (refused := verbs.refusal(done)) is None:
                self._forget(grant.proof)
                return True
            if not isinstance(refused, verbs.CHANGED):
                self._checked(refused)

    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        again: list[str] = []
        now = time.monotonic()
        until = min(ends, now + ANSWER[0]) if ends > now else now + 1.0
        if len(self._paths.get(nonce, ())) < len(resources):
            yield from self._finds(resources, nonce, until)
        paths = self._paths[nonce]
        found = yield from self.asking([verbs.delete(path) for path in paths], until, again)
        self._forget(nonce)
        if len(paths) < len(resources) or any(isinstance(its, NoNodeError) for its in found):
            return None if again else False
        for its in found:
            self._checked(its)
        return True

    def _leave(self, nonce: str) -> None:
        self._handed.add(nonce)

    def _ending(self, resources: tuple[str, ...], nonce: str) -> Steps[object]:
        if self._closes and self._end_session():
            return None
        try:
            if nonce not in self._handed:
                return (yield from self._giving_back(resources, nonce))
            # Only version 0: a process that has taken the lease over has changed the text of its entries.
            yield from self.all_of([verbs.delete(path, 0) for path in self._paths.get(nonce, ())])
        finally:
            if self._closes:  # `close` was called meanwhile, and the release may have begun a session
                self._end_session()
        self._forget(nonce)
        return None

    def _forget(self, nonce: str) -> None:
        self._handed.discard(nonce)
        for each in (self._paths, self._ttls, self._due):
            each.pop(nonce, None)

    def _gone_at(self, until: float) -> float:
        return until + 2 * self._timeout  # by then the servers have ended a session without contact
