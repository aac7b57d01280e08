"""Acquires leases: at once, or after a wait in the queues. `queues` explains worlds and calls."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from fencelock._backoff import randomly
from fencelock._generators import Steps
from fencelock.authority.base import AFTER, Grant, held_by_another, too_slow
from fencelock.authority.database.connecting import RefusedError, Work, is_in_doubt
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.listening import Ear
from fencelock.authority.database.queues import NAME_LENGTH, Place, Queues
from fencelock.authority.database.releasing import Owed, Releasing, holder, parts
from fencelock.authority.loops import HERE, Abandon, Later, Wait
from fencelock.errors import FencelockError, QuorumError
from fencelock.lease import validity

#: The most seconds between two checks of a held resource, if the database calls this world.
_HEARING: Final = 0.25
_BEHIND: Final = 0.01  # seconds between two checks without calls, for each world that is ahead in the queue
_SEVERAL: Final = 0.03  # the most seconds between two checks, if several resources are wanted at once
#: The least and the most seconds between two checks without calls, before a random factor.
_PAUSES: Final = {"postgresql": (0.002, 0.1), "mysql": (0.002, 0.05), "sqlite": (0.001, 0.05)}


class _Waiting(NamedTuple):
    """An acquisition, and its place in the queue."""

    resources: tuple[str, ...]
    end: float
    queues: Queues
    place: Place
    world: str  # the name that the acquisition has in the queue of worlds
    go_on: Callable[[], None]  # called after each wait; may raise


class Acquiring(Releasing):
    """A database that grants leases."""

    def acquire_gen(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        go_on: Callable[[], None] = lambda: None,
        at_least: float = 0.0,  # noqa: ARG002 - `keep_gen` needs nothing in advance
    ) -> Steps[Grant]:
        if fair:
            raise ValueError(
                f"{self!r} has no fair queue: fair=True needs nodes of Redis or Valkey, etcd or ZooKeeper"
            )
        nonce = secrets.token_hex(16)
        queues: Queues = yield HERE
        end = math.inf if timeout is None else time.monotonic() + timeout
        waiting = _Waiting(resources, end, queues, queues.new_place(ttl), queues.name, go_on)
        if len(resources) > 1:
            waiting = waiting._replace(world=queues.join_several(waiting.place))
        try:
            return (yield from self._in_queue(waiting, self._attempts(waiting, nonce, ttl)))
        except GeneratorExit:
            raise
        except BaseException as error:
            queues.leave(resources[0], waiting.place)  # again: `_in_queue` may be interrupted
            until = time.monotonic() + ttl
            nonces = [] if isinstance(error, FencelockError) else [nonce]
            if not nonces and (waiting.place.is_late or is_in_doubt(error.__cause__)):
                yield from self._owe(nonce, Owed(resources, until, in_doubt=True))
            if (unused := waiting.place.grant) is not None:
                nonces.append(unused.proof)
            if nonces:
                yield Abandon(functools.partial(self._abandoning, resources, nonces, until))
            if waiting.place.waits_for:
                yield Abandon(functools.partial(self._leaving_queues, resources, waiting.world))
            raise

    def _leaving_queues(self, resources: tuple[str, ...], world: str) -> Steps[None]:
        """Release the names that are kept for a caller of several, and remove it from their queues."""
        yield from self._giving_back(resources, world)

        def leave(connection: Lent) -> None:
            for part in parts(resources):
                connection.execute(self._says.leave_queue, {"resources": part, "world": world})

        yield from self.asking(Work(leave, durable=False))

    def _in_queue(self, waiting: _Waiting, steps: Steps[Grant]) -> Steps[Grant]:
        """Run `steps`; if the caller may wait for a single resource, with a place in this world's queue."""
        resources, end, queues, place, *_ = waiting
        try:
            if len(resources) == 1 and end > time.monotonic():
                queues.join(resources[0], place)
            return (yield from steps)
        except QuorumError as error:
            if error.__cause__ is not None:
                queues.fail(place, error)
            raise
        finally:
            queues.leave(resources[0], place)
            if len(resources) > 1:
                queues.leave_several(waiting.world)

    def _attempts(self, waiting: _Waiting, nonce: str, ttl: float) -> Steps[Grant]:
        resources, end, queues, place, *_ = waiting
        began = time.monotonic()

        def attempt(connection: Lent) -> Grant:
            tokens = self._mint(connection, resources, nonce, ttl, waiting.world)
            return Grant(resources, tuple(tokens), validity(began, ttl), nonce)

        looked_free = False
        work = Work(attempt, atomic=len(resources) > 1, statements=len(resources))
        waited = yield from self._standing(waiting)
        # If one of several resources is held, an attempt would lock the rows of the others in vain.
        if len(resources) > 1 or (queues.waited and queues.hears and end > began and not place.is_due):
            waited = (yield from self._waiting(waiting)) or waited
        while True:
            place.is_due = False
            began = time.monotonic()
            again: list[BaseException] = []
            until = max(end, began) + AFTER
            try:
                grant: Grant = place.grant or (
                    yield from self.asking(work, until=until, deadline=until, patient=False, again=again)
                )
            except RefusedError:
                waited = True
                place.is_late = place.is_late or any(map(is_in_doubt, again))
                if time.monotonic() >= end:
                    yield from self._refusing(waiting)
                looks_free = not (yield from self._waiting(waiting))
                if looks_free and looked_free:  # the attempt between these two checks was refused
                    yield from self._pausing(waiting, self._pause(waiting))
                looked_free = looks_free
                continue
            if time.monotonic() < grant.expires_at:
                queues.waited = waited
                if waited and not place.grant:
                    name = place.waits_for or resources[0]
                    queues.note_wait(name, time.monotonic() - place.next_since)
                place.queue.note_grant()
                return grant
            yield from self._giving_back(resources, grant.proof)
            raise too_slow(self._shown, ttl, resources)

    def _mint(
        self, connection: Lent, resources: tuple[str, ...], nonce: str, ttl: float, world: str
    ) -> Iterator[int]:
        asked = {"nonce": nonce, "ttl": ttl, "holder": holder(), "world": world}
        tokens = {}
        for resource in sorted(resources):
            token = self.token_of(connection, self._says.acquire, {**asked, "resource": resource})
            if token is None:
                raise RefusedError
            tokens[resource] = token
        return map(tokens.__getitem__, resources)

    def _standing(self, waiting: _Waiting) -> Steps[bool]:
        """Wait while callers of this world are ahead, and after that for the resource.

        Returns whether a caller was ahead. Otherwise there is no wait.
        """
        place, was_first = waiting.place, waiting.place.is_first
        while not place.is_first and place.error is None:
            if time.monotonic() >= waiting.end:
                raise held_by_another(waiting.resources, place.queue.held_for)
            yield Wait(waiting.end, place.wakeup)
            waiting.go_on()
        if place.error is not None:
            raise QuorumError(str(place.error), nodes=place.error.nodes)
        if not was_first:
            yield from self._pausing(waiting, self._pause(waiting))
            yield from self._waiting(waiting)
        return not was_first

    def _waiting(self, waiting: _Waiting) -> Steps[bool]:
        """Wait before an attempt, mostly until all resources look free; return whether there was a wait."""
        waited = False
        if self._says.can_call and waiting.queues.has_to_listen:
            with suppress(RuntimeError):  # no thread can be started
                yield Later(functools.partial(self._listening, waiting.queues))
        if waiting.place.is_late:  # a late statement of this acquisition may hold the resource
            yield from self._pausing(waiting, self._pause(waiting))
            return True
        while not waiting.place.is_due and (held := (yield from self._held(waiting))):
            longest, now = max(held.values()), time.monotonic()
            if now >= waiting.end:
                raise held_by_another(held, longest)
            waited = True
            yield from self._pausing(waiting, min(self._pause(waiting), longest))
        return waited

    def _pausing(self, waiting: _Waiting, seconds: float) -> Steps[None]:
        """Wait for `seconds`; end earlier at the timeout, or if an attempt or a check is due."""
        place, until = waiting.place, min(waiting.end, time.monotonic() + seconds)
        while time.monotonic() < until and not place.is_due and not place.looks:
            yield Wait(until, place.wakeup)
            waiting.go_on()
        place.looks = False

    def _pause(self, waiting: _Waiting) -> float:
        """Return how many seconds to wait before the next check.

        Without calls, the pause of the first world grows with the time since it became the first. The pause
        of another world grows with the number of worlds ahead.
        """
        if waiting.queues.hears:
            return _HEARING
        shortest, longest = _PAUSES[self._dialect]
        if len(waiting.resources) > 1:  # all must be free at one check, and each is kept for a moment only
            longest = min(longest, _SEVERAL)
        place = waiting.place
        waited, name = time.monotonic() - place.next_since, place.waits_for or waiting.resources[0]
        pause = _BEHIND * place.worlds_ahead or waiting.queues.pause_after(name, waited)
        return randomly(min(longest, max(shortest, pause)))

    def _refusing(self, waiting: _Waiting) -> Steps[None]:
        held = yield from self._held(waiting, gives_up=True)
        raise held_by_another(held or waiting.resources, max(held.values(), default=None))

    def _listening(self, queues: Queues) -> Steps[None]:
        def calling(channel: str) -> Steps[Any]:
            return self.asking(
                Work(lambda connection: connection.execute(self._says.call, {"channel": channel}))
            )

        def passing_on(name: str, resource: str) -> Steps[Any]:
            asked = {"resources": (resource,), "nonce": name}
            return self.asking(Work(lambda connection: connection.execute(self._says.release, asked)))

        def listen(ear: Ear) -> Steps[None]:
            try:
                yield ear
            finally:
                ear.close()

        queues.ear = Ear(queues, calling, passing_on)  # assigned now, so that `close` finds it
        return listen(queues.ear)

    def _held(self, waiting: _Waiting, *, gives_up: bool = False) -> Steps[dict[str, float]]:
        """Return the resources that are held, each with the remaining seconds.

        From time to time, the caller also joins queues in the database, unless it `gives_up`.
        """
        queue = waiting.place.queue
        may_wait = not gives_up and waiting.end > time.monotonic()
        queues_up = may_wait and (len(waiting.resources) > 1 or queue.has_to_queue)

        def look(connection: Lent) -> list[Any]:
            return self._look(connection, waiting, queues_up=queues_up)

        until = max(waiting.end, time.monotonic()) + AFTER
        rows = yield from self.asking(Work(look, durable=False), until=until, deadline=until)
        held = {name: float(left) for name, left, _ in rows}
        waiting.place.worlds_ahead = max((place // NAME_LENGTH for *_, place in rows), default=0)
        if waiting.place.worlds_ahead:
            waiting.place.next_since = time.monotonic()
        if held:
            queue.held_until = time.monotonic() + max(held.values())
        return held

    def _look(self, connection: Lent, waiting: _Waiting, *, queues_up: bool) -> list[Any]:
        resources, place, world = waiting.resources, waiting.place, waiting.world
        if queues_up and len(resources) == 1:
            queued = connection.execute(self._says.queue_up, {"resource": resources[0], "world": world})
            if not queued.changed:
                place.queue.end_wait()
            if self._says.can_call:
                return [(resources[0], *row) for row in queued.rows]
        rows = [
            row
            for part in parts(resources)
            for row in connection.execute(self._says.occupied, {"resources": part, "world": world}).rows
        ]
        first = min(rows, default=None)
        if first is not None and not first[2]:  # not in the queue: its turn has passed unseen
            place.queue.end_wait()
        if queues_up and len(resources) > 1 and first is not None:
            self._queue_up(connection, waiting, first[0])
        return rows

    def _queue_up(self, connection: Lent, waiting: _Waiting, first: str) -> None:
        """Wait for the first resource that is occupied.

        If another one was just kept for the caller, keep the free ones before the next one for a moment. Not
        before: the first wait may be long.
        """
        resources, place, world = waiting.resources, waiting.place, waiting.world
        if place.waits_for == first and not place.queue.has_to_queue:
            return
        was_called = place.waits_for not in {"", first}
        before = sorted(name for name in resources if name < first) if was_called else []
        for part in parts(tuple(before)):
            connection.execute(self._says.keep_free, {"resources": part, "world": world})
        place.waits_for = first
        if not connection.execute(self._says.queue_up, {"resource": first, "world": world}).changed:
            place.is_due = True  # it was released meanwhile
