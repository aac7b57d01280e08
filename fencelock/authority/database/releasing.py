"""Releases leases, or transfers them to the next caller; repeats releases that a server did not answer."""

from __future__ import annotations

import functools
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

from fencelock._backoff import pauses
from fencelock._generators import Steps
from fencelock._owners import name_of_process
from fencelock.authority.base import Grant, logger, named
from fencelock.authority.database.connecting import ANSWER, Connecting, Work
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.queues import Place, Queues
from fencelock.authority.database.statements import Statement
from fencelock.authority.loops import HERE, Abandon, Later, Wait
from fencelock.errors import AuthorityError, FencelockError, QuorumError
from fencelock.lease import validity

#: Stands for the name of an unknown world (see `queues.py`), for which a resource may be kept.
_ANOTHER: Final = "another"
_MAY_BE_LOST: Final = 5.0  # seconds after the confirmation of a release in which a failover may undo it
BATCH: Final = 500  # the most resources in one statement; to extend a grant, there may be more


class Owed(NamedTuple):
    """A release that is still to be sent."""

    resources: tuple[str, ...]
    until: float  # when the lease ends without a release, on the clock of `time.monotonic`
    #: The acquisition may still be on its way to the server; a release that finds nothing may be too early.
    in_doubt: bool


class Releasing(Connecting):
    """A database that releases leases, and repeats releases that may have been lost."""

    def _start_over(self) -> None:
        super()._start_over()
        self._owed: dict[str, Owed] = {}
        self._settler: object | None = None  # stands for the thread, or task, that sends the owed releases
        #: The last releases that a server has confirmed, each with its time. A failover may undo them.
        self._confirmed: deque[tuple[float, str, Owed]] = deque(maxlen=256)

    def close(self) -> None:
        """Close the connections. Held leases end with their ttl; the next use connects again."""
        self._settler = None  # first, because its thread could connect again
        super().close()

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        queues: Queues = yield HERE
        #: The end of the lease, and of the lease that the next caller may get, by nonce.
        ends = {grant.proof: grant.expires_at}
        place: Place | None = None
        try:
            if (place := queues.next_of(grant.resources)) is not None:
                ends[nonce := secrets.token_hex(16)] = time.monotonic() + place.ttl
                return (yield from self._transferring(grant, nonce, queues, place))
            done = yield from self._giving_back(grant.resources, grant.proof, grant.expires_at)
        except QuorumError as error:
            for each, until in ends.items():
                yield from self._owe(each, Owed(grant.resources, until, in_doubt=each != grant.proof))
            raise QuorumError(
                f"{error}; it is released when the database answers", nodes=error.nodes
            ) from error
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            if place is not None and (given := place.grant) is not None and given.proof in ends:
                del ends[given.proof]  # the next caller has this grant, and may not have been woken
                queues.deliver(place, given)
            yield Abandon(
                functools.partial(self._abandoning, grant.resources, list(ends), max(ends.values()))
            )
            raise
        owed = Owed(grant.resources, grant.expires_at, in_doubt=False)
        self._confirmed.append((time.monotonic(), grant.proof, owed))
        return done

    def keep_gen(self, grant: Grant, until: float) -> Steps[bool | None]:
        def keep(connection: Lent) -> int:
            asked = {"nonce": grant.proof, "ttl": max(until - time.monotonic(), 0.0)}
            return sum(
                connection.execute(self._says.keep, {**asked, "resources": part}).changed
                for part in parts(grant.resources)
            )

        count: int
        try:
            count = yield from self.asking(Work(keep), until=grant.expires_at)
        except (FencelockError, GeneratorExit):
            raise
        except BaseException:  # a signal handler's error, or a cancellation: send it once more
            yield Abandon(functools.partial(self.asking, Work(keep), until=grant.expires_at))
            raise
        return count == len(grant.resources)

    def _transferring(self, grant: Grant, nonce: str, queues: Queues, place: Place) -> Steps[bool | None]:
        """Release a lease, and acquire it for the next caller in `queues`, in one statement."""
        (resource,) = grant.resources
        asked = {"resource": resource, "nonce": grant.proof, "next_nonce": nonce, "ttl": place.ttl}
        asked["holder"] = holder()

        def transfer(connection: Lent) -> int | None:
            return self.token_of(connection, self._says.transfer, asked)

        began = time.monotonic()
        until = min(grant.expires_at, began + ANSWER[0]) if grant.expires_at > began else began + ANSWER[1]
        again: list[BaseException] = []
        token: int | None = yield from self.asking(Work(transfer), until=until, again=again)
        if token is not None:
            transferred = Grant(grant.resources, (token,), validity(began, place.ttl), nonce)
            if queues.deliver(place, transferred):
                return True
        # A repeated statement finds nothing if the first one has arrived.
        if token is not None or again:
            yield from self._giving_back(grant.resources, nonce)
        queues.released(resource, _ANOTHER)
        return True if token is not None else None if again else False

    def _losing(self) -> Steps[None]:
        """Send the latest releases again, because the next server may not know of them."""
        since = time.monotonic() - _MAY_BE_LOST
        with suppress(IndexError):  # another thread was quicker
            while self._confirmed:
                at, nonce, owed = self._confirmed.popleft()
                if at > since:
                    yield from self._owe(nonce, owed)

    def _owe(self, nonce: str, owed: Owed) -> Steps[None]:
        """Release in the background, while the caller goes on."""
        self._owed[nonce] = owed
        if self._settler is None:
            self._settler = settler = object()
            try:
                yield Later(functools.partial(self._settling, settler))
            except RuntimeError:  # no thread can be started, as when the interpreter ends
                self._settler = None

    def _abandoning(self, resources: tuple[str, ...], nonces: list[str], until: float) -> Steps[None]:
        """Release what an interrupted operation may have left; if the server is silent, in the background."""
        for nonce in nonces:
            try:
                yield from self._giving_back(resources, nonce)
            except QuorumError:
                yield from self._owe(nonce, Owed(resources, until, in_doubt=True))

    def _settling(self, settler: object) -> Steps[None]:
        """Send the owed releases until all are confirmed, or until `close`; the next one goes on."""
        looks = pauses(0.1, 1.0)
        try:
            while self._owed and self._settler is settler:
                yield Wait(time.monotonic() + next(looks))
                yield from self._settling_once(settler)
        finally:  # also if its event loop ends
            if self._settler is settler:
                self._settler = None

    def _settling_once(self, settler: object) -> Steps[None]:
        for nonce, owed in list(self._owed.items()):
            if self._settler is not settler:
                return
            if time.monotonic() < owed.until:
                try:
                    found = yield from self._giving_back(owed.resources, nonce)
                except QuorumError:
                    return
                except AuthorityError as error:
                    name = named(owed.resources)
                    logger.warning("%s could not be released, and ends with its ttl: %s", name, error)
                else:
                    if owed.in_doubt and not found:
                        continue
            self._owed.pop(nonce, None)

    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        """Release, and wake the next caller; wait only briefly if the lease has ended already."""
        queues: Queues = yield HERE
        kept: dict[str, str] = {}
        asked = {"nonce": nonce}

        def release(connection: Lent) -> int:
            count = 0
            for part in parts(resources):
                done = connection.execute(self._says.release, {**asked, "resources": part})
                kept.update(done.rows)
                count += done.changed
            return count

        again: list[BaseException] = []
        now = time.monotonic()
        until = min(ends, now + ANSWER[0]) if ends > now else now + ANSWER[1]
        count: int = yield from self.asking(Work(release, durable=False), until=until, again=again)
        for resource in resources:
            queues.released(resource, kept.get(resource, _ANOTHER))
        # A repeated statement finds nothing if the first one has arrived.
        return True if count == len(resources) else None if again else False

    def token_of(self, connection: Lent, statement: Statement, asked: dict[str, Any]) -> int | None:
        """Execute a statement that mints; return the token, or None if the resource is not ours."""
        made = connection.execute(statement, asked)
        if self._dialect == "mysql":
            return made.lastrowid or None
        if self._dialect == "sqlite":
            asked = {**asked, "nonce": asked.get("next_nonce", asked["nonce"])}
            token = connection.scalar(self._says.token, asked)
            return None if token is None else int(token)
        return made.rows[0][0] if made.rows else None


def holder() -> str:
    """Return the name of this process in ASCII, because a database may store no other characters."""
    return name_of_process(os.getpid()).encode("ascii", "backslashreplace").decode()[:255]


def parts(resources: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (resources[start : start + BATCH] for start in range(0, len(resources), BATCH))
