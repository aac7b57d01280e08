"""Programs for child processes: signal handlers that strike at any moment, and forks.

`python -m tests.authorities.programs NAME URL` runs one, and the last line that it prints is JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import redis

import fencelock
from fencelock import Database, Redlock
from fencelock.authority.base import Grant
from fencelock.errors import AuthorityError, FencelockError, LockLostError
from fencelock.holder import Holder
from fencelock.lease import Lease, held_leases
from tests.authorities.faces import AsyncFace, BlockingFace, Client, Face, Loop, is_free_soon, is_held
from tests.polling import eventually
from tests.redlock.views import connections_of

#: Seconds after which a program that hangs says where; a forked child, which cannot, ends without a word.
_HUNG: Final = 55
_HUNG_CHILD: Final = 50


class SoftTimeLimitError(Exception):
    """What a task queue raises in its handler; drivers that catch every Exception catch it too."""


class _Alarm:
    """A signal handler that raises once, as Ctrl-C does or as a task queue does."""

    def __init__(self) -> None:
        self.armed = False
        self.kind: type[BaseException] = KeyboardInterrupt
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise self.kind

    def set(self, seconds: float, kind: type[BaseException]) -> None:
        """Strike in so many seconds."""
        self.kind = kind
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def clear(self) -> None:
        """Strike no more."""
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(url: str, seconds: float = 1.2) -> dict[str, Any]:
    """Acquire and release while a handler raises; return the locks that an interruption left behind."""
    authority, other, alarm = fencelock.configure(url), BlockingFace(fencelock.configure(url)), _Alarm()
    kinds = (KeyboardInterrupt, SoftTimeLimitError)
    dice = random.Random(1)
    is_free_soon(other, "warm")
    authority.release(authority.acquire(("warm",), ttl=30.0, timeout=5.0))
    longest = 1.5 * _seconds_of(authority)
    interrupted, left, odd = 0, list[str](), list[str]()
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        number += 1
        name, again, kind = f"n{number}", f"n{number} too", kinds[number % 2]
        names = (name, again) if number % 3 == 0 else (name,)
        grant: Grant | None = None
        try:
            alarm.set(dice.random() * longest + 1e-5, kind)
            # Written out, for behind a call with `*` a handler may strike before the answer is kept.
            grant = authority.acquire(names, ttl=30.0, timeout=5.0)
            authority.release(grant)
            alarm.clear()
        except kinds:
            interrupted += 1
            if grant is not None:
                # The handler may have struck before the first line of `release`. A program that still holds a
                # lock asks again.
                authority.release(grant)
            if not is_free_soon(other, *names):
                left.append(name)
        except Exception as error:  # noqa: BLE001 - told, and the test fails
            odd.append(_told(error))
            if grant is not None:
                authority.release(grant)
            if not is_free_soon(other, *names):
                left.append(name)
        alarm.clear()
    works = is_free_soon(BlockingFace(authority), "afterwards")
    return {"interrupted": interrupted, "left": left, "odd": _counted(odd), "works": works}


def _told(error: BaseException) -> str:
    """Return what was raised, and in the midst of what."""
    behind = error.__cause__ or error.__context__
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{said}\n  behind {_told(behind)}" if behind is not None else said


def _seconds_of(authority: Client) -> float:
    began = time.monotonic()
    for _ in range(5):
        authority.release(authority.acquire(("warm",), ttl=30.0, timeout=5.0))
    return (time.monotonic() - began) / 5


def lock_in_handlers(url: str, seconds: float = 1.2) -> dict[str, Any]:
    """Lock in a handler that strikes while the same authority acquires, extends, remints and releases."""
    authority = fencelock.configure(url)
    dice, rounds, odd = random.Random(2), 0, list[str]()
    took, refused = list[float](), list[float]()
    longest = max(0.001, _seconds_of(authority))

    def lock_too(*_: object) -> None:
        began = time.monotonic()
        try:
            grant = authority.acquire((f"handler{len(took)}",), ttl=5.0, timeout=5.0)
            authority.release(grant)
        except RuntimeError:
            refused.append(began)
        except FencelockError as error:
            odd.append(f"in the handler: {_told(error)}")
        took.append(time.monotonic() - began)
        signal.setitimer(signal.ITIMER_REAL, dice.random() * longest * 3 + 1e-5)

    signal.signal(signal.SIGALRM, lock_too)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    until = time.monotonic() + seconds
    # A file of SQLite has one writer: a handler waits in vain for a transaction that it has interrupted.
    several = not url.startswith("sqlite")
    while time.monotonic() < until:
        rounds += 1
        try:
            names = (f"body{rounds}", f"body{rounds} too")[: 1 + several]
            grant = authority.acquire(names, ttl=20.0, timeout=5.0)
            (said,) = authority.extend_many([(grant, 30.0)])
            if not isinstance(said, Grant):
                raise said
            if authority.release(authority.remint(said, 30.0)) is not True:
                odd.append("it was held, and could not be released")
        except FencelockError as error:
            odd.append(f"behind the handler: {_told(error)}")
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    counts = {"handled": len(took), "refused": len(refused), "rounds": rounds}
    return {**counts, "odd": _counted(odd), "longest": max(took)}


def _counted(odd: list[str]) -> list[str]:
    """Return each once, with how often it occurred, whatever numbers stand in it."""
    odd = [re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", each) for each in odd]
    return [f"{odd.count(each)} times {each}" for each in sorted(set(odd), key=odd.count)]


def fork_blocking(url: str) -> dict[str, Any]:
    return _fork(BlockingFace, url)


def fork_asyncio(url: str) -> dict[str, Any]:
    """Fork a process with a loop in another thread; the child has a loop of its own."""
    return _fork(lambda client: AsyncFace(client, Loop()), url)


def _fork(look_at: Callable[[Client], Face], url: str) -> dict[str, Any]:
    """Use one authority in a parent and two children at once: one exits at once, one as Python does.

    The parent holds a lock and waits for another one when it forks, and the children wait for that too.
    """
    faulthandler.cancel_dump_traceback_later()  # a child would wait for its thread at its end
    signal.alarm(_HUNG)
    authority: Any = fencelock.configure(url)
    mine, other = look_at(authority), look_at(fencelock.configure(url))
    held, contended = mine.acquire("parent", ttl=60.0), other.acquire("contended", ttl=60.0)
    lock = authority.lock("block")
    lease = mine.loop.run(lock.aio.acquire()) if isinstance(mine, AsyncFace) else lock.acquire()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(_wait, mine)
        time.sleep(0.3)
        children = {}
        for number in range(2):
            reader, writer = os.pipe()
            if not (child := os.fork()):
                _be_a_child(look_at(authority), lock, lease, writer)
                if number:
                    sys.exit(0)  # closes what it thinks is its own
                os._exit(0)
            os.close(writer)
            children[child] = reader
        parent = _use(mine, "ours")
        for reader in children.values():
            os.read(reader, 1)  # each child waits, too
        other.release(contended)
        waited = waits.result()
    told = []
    for child, reader in children.items():
        with os.fdopen(reader) as lines:
            told.append(json.loads(lines.read() or '"it hung"'))
        os.waitpid(child, 0)
    (said,) = mine.extend_many([(held, 60.0)])
    return {
        "parent": parent,
        "waited": waited,
        "children": told,
        "extended": isinstance(said, Grant),
        "stays held": is_held(other, "parent") and is_held(other, "block") and not lease.lost,
        "goes on": _use(mine, "ours"),
        "released": mine.release(held),
        "free": is_free_soon(other, "parent"),
    }


def _wait(face: Face) -> bool:
    """Wait for a held lock; return whether it was granted and could be given back."""
    return face.release(face.acquire("contended", ttl=60.0, timeout=40.0)) is True


def _wait_behind_others(face: Face, writer: int) -> dict[str, bool]:
    """Wait, and say so through a pipe once the nodes call this process."""
    with ThreadPoolExecutor(1) as threads:
        waited = threads.submit(_wait, face)
        if isinstance(face.client, Redlock):
            is_called = eventually(lambda: connections_of(face).queue.hears)
        else:
            is_called = True
            time.sleep(0.3)
        os.write(writer, b" ")
        return {"waited": waited.result(), "is called": is_called}


def _be_a_child(face: Face, lock: Any, lease: Lease, writer: int) -> None:
    """Tell through a pipe what a forked child gets."""
    signal.alarm(_HUNG_CHILD)
    try:
        own = face.acquire(f"of {os.getpid()}", ttl=20.0)
        told: Any = {
            "refused": is_held(face, "parent"),
            "lost": lease.lost and all(each.lost for each in held_leases()),
            "keeps out of it": isinstance(face, AsyncFace)
            or (_is_lost(lock.extend) and _is_lost(lock.release)),
            "named": _holder(face, own.resources[0]).pid == os.getpid(),
            "used": _use(face, f"child{os.getpid()}"),
            **_wait_behind_others(face, writer),
        }
        face.release(own)
    except BaseException:  # noqa: BLE001 - the parent tells
        told = traceback.format_exc()
    os.write(writer, json.dumps(told).encode())
    os.close(writer)


def _is_lost(action: Callable[[], object]) -> bool:
    try:
        action()
    except LockLostError:
        return True
    return False


def _holder(face: Face, resource: str) -> Holder:
    client: Any = face.client
    info = (
        face.loop.run(client.aio.inspect(resource))
        if isinstance(face, AsyncFace)
        else client.inspect(resource)
    )
    holder: Holder = info.holder
    return holder


def _use(face: Face, name: str, rounds: int = 15) -> bool:
    """Acquire and release some times; tell whether each answer was the one to that question."""
    tokens = []
    for number in range(rounds):
        resource = f"{name}{number % 3}"
        grant = face.acquire(resource, ttl=20.0, timeout=5.0)
        tokens.append(grant.tokens[0])
        if grant.resources != (resource,) or face.release(grant) is not True:
            return False
    return all(tokens[place] > tokens[place - 3] for place in range(3, rounds))


def lock_in_many_threads(url: str) -> int:
    """Lock in 30 threads for two seconds: other names, then one, which most of them wait for."""
    end = time.monotonic() + 2.0

    def work(number: int) -> int:
        count = 0
        while (now := time.monotonic()) < end:
            with authority.lock(f"r{number}" if now < end - 1.0 else "r", timeout=20):
                count += 1
        return count

    with Database(url) as authority, ThreadPoolExecutor(30) as threads:
        return sum(threads.map(work, range(30)))


def connect_under_signals(url: str, seconds: float = 10.0) -> dict[str, Any]:
    """Lock in 40 threads while a handler raises in one that closes the connections, and opens them again.

    Each counter of the nodes has a range of its own, so that the answer to another's question shows.
    """
    end, apart = time.monotonic() + seconds, 10**7
    for node in url.split(","):
        with redis.Redis.from_url(node) as client:
            client.hset("{fencelock}", mapping={f"c{at}": 10**12 + at * apart for at in range(1024)})
    authority = Redlock(url)
    odd, wrong = list[str](), list[tuple[str, int]]()

    def work(number: int) -> int:
        count = 0
        while time.monotonic() < end:
            count += 1
            name = f"t:{number}:{count}"
            low = 10**12 + zlib.crc32(name.encode()) % 1024 * apart
            try:
                with authority.lock(name, timeout=3, ttl=10) as token:
                    if not low < token < low + apart:
                        wrong.append((name, token))
            except AuthorityError:
                pass  # its connections were closed
            except Exception as error:  # noqa: BLE001 - told, and the test fails
                odd.append(_told(error))
        return count

    with ThreadPoolExecutor(40) as threads:
        working = [threads.submit(work, number) for number in range(40)]
        strikes = _be_struck(authority, end, odd)
    count = sum(each.result() for each in working)
    return {"count": count, "strikes": strikes, "odd": _counted(odd), "wrong": wrong[:5]}


def _be_struck(authority: Redlock, end: float, odd: list[str]) -> int:
    """Close the connections, and lock, while a handler raises; return how often it has."""
    alarm, dice, strikes = _Alarm(), random.Random(4), 0
    while time.monotonic() < end:
        try:
            alarm.set(dice.uniform(0.001, 0.03), SoftTimeLimitError)
            if dice.random() < 0.5:
                authority.close()
            with authority.lock(f"main:{dice.randrange(3)}", timeout=2):
                pass
            alarm.clear()
        except SoftTimeLimitError:
            strikes += 1
        except AuthorityError:
            pass
        except Exception as error:  # noqa: BLE001 - told, and the test fails
            odd.append(_told(error))
        alarm.clear()
    return strikes


PROGRAMS: Final = {
    program.__name__: program
    for program in (
        *(interrupt, lock_in_handlers, connect_under_signals),
        *(fork_blocking, fork_asyncio, lock_in_many_threads),
    )
}

if __name__ == "__main__":
    faulthandler.dump_traceback_later(_HUNG, exit=True)
    print(json.dumps(PROGRAMS[sys.argv[1]](sys.argv[2])))  # noqa: T201 - that is how it tells
