"""Clients that fight over resources, the journal of their grants, and the rules for the journal."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final, NamedTuple

from fencelock.authority.base import Grant
from fencelock.errors import AuthorityError, LockTimeoutError
from tests.authorities.faces import AsyncClient, Face
from tests.authorities.stage import Stage, together


class Entry(NamedTuple):
    """A lease in the journal; all times are of `time.monotonic`.

    Attributes:
        resource: what was granted.
        token: its fencing token.
        began: when its acquisition began.
        completed: when it had completed.
        given_up: when its holder stopped to rely on it: at its end, or before it was released.
    """

    resource: str
    token: int
    began: float
    completed: float
    given_up: float


def entries(grant: Grant, began: float, completed: float, given_up: float) -> list[Entry]:
    """Return a line of the journal for each resource of a grant."""
    given_up = min(given_up, grant.expires_at)
    return [
        Entry(resource, token, began, completed, given_up)
        for resource, token in zip(grant.resources, grant.tokens, strict=True)
    ]


class Habits(NamedTuple):
    """What contenders do with what they are granted.

    Attributes:
        resources: what they ask for, the hot one first: it is every second choice.
        ttl: of each lease, in seconds.
        abandoned: the part of the leases that their holders let expire.
        twice: the part of the releases that are sent twice.
    """

    resources: Sequence[str] = ("hot", "warm", "cool")
    ttl: float = 0.05
    abandoned: float = 0.25
    twice: float = 0.25


#: So many leases show something; they take a slow server longer, but no longer than these seconds.
_ENOUGH: Final = 12
_LONGEST: Final = 40.0


def contend(face: Face, habits: Habits, seed: int, seconds: float, journal: list[Entry]) -> None:
    """Acquire and release, or let expire, for some seconds; write a journal, in which others write too."""
    dice, start, ttl = random.Random(seed), time.monotonic(), habits.ttl
    while True:
        began = time.monotonic()
        if began > start + (seconds if len(journal) >= _ENOUGH else _LONGEST):
            return
        resource = dice.choice((habits.resources[0], dice.choice(habits.resources)))
        try:
            grant = face.acquire(resource, ttl=ttl, timeout=dice.choice((0, 0.2)))
        except LockTimeoutError:
            continue
        except AuthorityError:  # it was granted too late for its ttl
            ttl = min(1.5 * ttl, 2.0)
            continue
        completed = time.monotonic()
        time.sleep(dice.random() * ttl / 5)
        given_up = time.monotonic()
        if dice.random() < habits.abandoned:
            given_up = grant.expires_at
        else:
            with suppress(AuthorityError):  # a server that is slow now releases it when it answers
                face.release(grant)
                if dice.random() < habits.twice:
                    face.release(grant)
        journal.extend(entries(grant, began, completed, given_up))


def race(stage: Stage, habits: Habits, seconds: float = 0.4) -> list[Entry]:
    """Have three clients contend, two threads of each; return the journal of all."""
    faces = [stage.new() for _ in range(3)] * 2
    journal = list[Entry]()
    together(
        *(
            lambda face=face, seed=seed: contend(face, habits, seed, seconds, journal)
            for seed, face in enumerate(faces)
        )
    )
    assert len(journal) >= _ENOUGH, "too few were granted to show anything"
    return journal


async def contend_as_task(client: AsyncClient, resource: str, rounds: int) -> list[Entry]:
    """Acquire and release some times, as a task; return the journal."""
    journal = list[Entry]()
    for _ in range(rounds):
        began = time.monotonic()
        grant = await client.acquire((resource,), ttl=10.0, timeout=20.0)
        completed = time.monotonic()
        given_up = time.monotonic()
        await client.release(grant)
        journal += entries(grant, began, completed, given_up)
    return journal


def _by_resource(journal: Iterable[Entry]) -> list[list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in journal:
        found[entry.resource].append(entry)
    return list(found.values())


def assert_unique(journal: Iterable[Entry]) -> None:
    """No two leases of a resource carry one token."""
    for leases in _by_resource(journal):
        tokens = [lease.token for lease in leases]
        assert len(set(tokens)) == len(tokens), f"{leases[0].resource}: granted twice: {_repeated(tokens)}"


def _repeated(tokens: Sequence[int]) -> list[int]:
    return sorted({token for token in tokens if tokens.count(token) > 1})


def assert_in_order(journal: Iterable[Entry]) -> None:
    """An acquisition that began after another had completed has the larger token: true of each pair."""
    for leases in _by_resource(journal):
        for one in leases:
            for other in leases:
                if other.began > one.completed:
                    assert other.token > one.token, f"{other} came after {one}"


def assert_exclusive(journal: Iterable[Entry]) -> None:
    """No lease was granted while the holder of another could rely on it, and their tokens rise."""
    for leases in _by_resource(journal):
        relied_on = [lease for lease in leases if lease.completed < lease.given_up]
        relied_on.sort(key=lambda lease: lease.completed)
        for one, following in pairwise(relied_on):
            assert following.completed >= one.given_up, f"{following} was granted while {one} was held"
            assert following.token > one.token, f"{following} came after {one}"
