"""A client that lies: texts of `hand_over` that were made up or changed, and any number to nodes.

It names locks of its own only. Whatever it says, it may hurt those, and no other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Final

from fencelock._locking import take_over
from fencelock.authority.base import Grant
from fencelock.authority.line.line import LineAuthority
from fencelock.authority.redlock.protocol.attempts import Attempt, in_pairs, release_command
from fencelock.authority.redlock.protocol.messages import Broadcast, Command
from fencelock.authority.redlock.redlock import Redlock
from fencelock.errors import FencelockError
from fencelock.lock.base import HANDED
from fencelock.tokens import MAX_COUNTER, MAX_TOKEN
from proof.torture.stage import Stage

#: So many that there is one for almost each counter of the nodes.
_NAMES: Final = [f"lie {number}" for number in range(8192)]
_MOST_NAMES: Final = 200


class Liar:
    """A client of the authority that grants the leases, with connections of its own."""

    def __init__(self, authority: Any) -> None:
        self._authority = authority

    def lie(self, rng: random.Random) -> None:
        """Say something, and have it refused or not."""
        ways: list[Callable[[random.Random], object]] = [self._make_up_a_text, self._change_a_text]
        if isinstance(self._authority, Redlock):
            ways += [self._name_numbers] * 2
        with suppress(FencelockError, ValueError):
            rng.choice(ways)(rng)

    def _make_up_a_text(self, rng: random.Random) -> None:
        if isinstance(self._authority, Redlock):
            proof = {"namespace": self._authority._namespace, "nonce": f"{rng.getrandbits(172):043x}"}
        elif isinstance(self._authority, LineAuthority):
            proof = self._authority.dump(Grant((), (), 0.0, f"{rng.getrandbits(63):016x}"))
        else:
            proof = {
                "database": self._authority.url.get_backend_name(),
                "nonce": f"{rng.getrandbits(128):032x}",
            }
        names = rng.sample(_NAMES, rng.randint(1, _MOST_NAMES))
        self._enter(names, [_number(rng) for _ in names], proof)

    def _change_a_text(self, rng: random.Random) -> None:
        name = rng.choice(_NAMES)
        lock = self._authority.lock(name, ttl=1, timeout=0, renew=False, if_lost="warn")
        lock.acquire()
        its = json.loads(lock.hand_over())[HANDED]
        more = rng.sample(_NAMES, rng.randint(0, 3))
        self._enter([name, *more], [_number(rng) for _ in (name, *more)], its["proof"])

    def _enter(self, names: Sequence[str], tokens: Sequence[int], proof: object) -> None:
        its = {"resources": names, "tokens": tokens, "ttl": 1.0, "proof": proof, "by": "a liar"}
        with take_over(json.dumps({HANDED: its}), authority=self._authority, if_lost="warn"):
            pass

    def _name_numbers(self, rng: random.Random) -> None:
        """Hold a lock, and confirm, extend, release or hint at it with any number; or without holding it."""
        name, nonce = rng.choice(_NAMES), f"{rng.getrandbits(172):043x}"
        lock = self._authority.lock(name, ttl=1, timeout=0, renew=False, if_lost="warn")
        if rng.random() < 1 / 2:
            lock.acquire()
            nonce = json.loads(lock.hand_over())[HANDED]["proof"]["nonce"]
        self._authority.run(self._send(rng, name, nonce))

    def _send(self, rng: random.Random, name: str, nonce: str) -> Generator[Broadcast, Any, None]:
        node_set = self._authority._current()
        attempt = Attempt.of(node_set, (name,), nonce, 1.0)
        pairs = tuple(in_pairs(attempt.stripes, [_number(rng)]))
        epoch = rng.choice((0, 0, 1, 524287))
        command = rng.choice(
            [
                Command("confirm", nonce, attempt.keys, (node_set.fingerprint, nonce, epoch, *pairs)),
                Command("acquire", nonce, attempt.keys, (node_set.fingerprint, nonce, 1000, epoch, *pairs)),
                release_command(node_set, attempt, epoch, (_number(rng),)),
            ]
        )
        yield Broadcast(command, node_set.all_nodes, lambda _: False, node_set.patience)


def _number(rng: random.Random) -> int:
    return rng.choice((1, MAX_COUNTER, MAX_COUNTER - 1, MAX_TOKEN, rng.randint(1, MAX_COUNTER)))


def tell_lies(stage: Stage, rng: random.Random) -> None:
    told = 0
    with stage.fault("lie", "client") as note:
        for _ in range(rng.randint(10, 50)):
            if not stage.over.is_set():
                stage.tool(Liar).lie(rng)
                told += 1
        note.detail = f"{told} lies"
