"""A handler may raise at any moment, as those of Ctrl-C and soft time limits do, and no lock stays behind.

Python runs handlers between two instructions, wherever that is. What they interrupt runs in a process of its
own.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import hiredis
import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.protocol.messages import SYNC, Command
from fencelock.authority.redlock.wire.codec import pack
from proof.servers import Nodes

_INTERRUPTED = """
import json, random, signal, sys, threading, time

class Interrupted(Exception): pass

armed = False

def is_at_the_first_instruction(frame):
    # Of __exit__: there a handler that raises leaves the lock to its ttl, because nothing has run yet.
    return frame.f_code.co_name == "__exit__" and frame.f_lineno == frame.f_code.co_firstlineno

def interrupt(_, frame):
    global armed
    if armed and not is_at_the_first_instruction(frame):
        armed = False
        raise Interrupted

signal.signal(signal.SIGALRM, interrupt)
"""

#: Packs a command with numbers, while a handler raises after each 50 microseconds.
_PACKING = """
from fencelock.authority.redlock.wire.codec import pack
from fencelock.authority.redlock.protocol.messages import Command

command = Command("extend", "", ("{fencelock}:n", "a", "b"), tuple(range(10**9, 10**9 + 200)))
count = 0
while count < 300:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.00005)
        while True:
            pack(command)
    except Interrupted:
        count += 1
print(json.dumps({"interrupted": count}))
"""

#: Enters and leaves blocks, and tells which locks are still on the nodes, or held, after an interruption.
_LOCKING = """
from fencelock import Redlock, fenced_lock
from fencelock.lock.hold import everything_held
import redis

authority = Redlock(sys.argv[1:])
nodes = [redis.Redis.from_url(url) for url in sys.argv[1:]]

def left(name):
    return [node.pttl("{fencelock}:l:" + name) for node in nodes if node.exists("{fencelock}:l:" + name)]

random.seed(1)
with fenced_lock("warm", authority=authority):
    pass
took = []
for _ in range(20):
    began = time.monotonic()
    with fenced_lock("warm", authority=authority):
        pass
    took.append(time.monotonic() - began)
longest = 1.5 * min(took)
count, found = 0, []
for round in range(3000):
    name = f"n{round}"
    lock = fenced_lock(name, authority=authority, timeout=2)
    signal.setitimer(signal.ITIMER_REAL, random.random() * longest + 1e-5)
    try:
        armed = True
        with lock:
            pass
        armed = False
    except Interrupted:
        count += 1
        interrupted = True
    else:
        interrupted = False
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    if interrupted:
        until = time.monotonic() + 2
        while (there := left(name)) and time.monotonic() < until:
            time.sleep(0.002)
        if there or lock.leases or any(name in hold.grant.resources for hold in everything_held()):
            found.append([name, there, bool(lock.leases)])
time.sleep(0.3)
# A thread that failed to start, for it was interrupted, stays among these.
threads = sum(thread.name == "fencelock-renewal" and thread.is_alive() for thread in threading.enumerate())
print(json.dumps({"interrupted": count, "left": found, "threads": threads}))
"""

#: Locks in a handler, while a lock is taken, reminted and given back.
_LOCKING_IN_HANDLERS = """
from fencelock import Redlock, fenced_lock
from fencelock.lock.hold import everything_held

authority = Redlock(sys.argv[1:])
count, refused = 0, set()

def lock_too(*_):
    global count
    count += 1
    try:
        with fenced_lock(f"handler{count}", authority=authority, ttl=5):
            pass
    except RuntimeError as error:
        refused.add(str(error))
    signal.setitimer(signal.ITIMER_REAL, random.random() * 0.003 + 1e-5)

signal.signal(signal.SIGALRM, lock_too)
signal.setitimer(signal.ITIMER_REAL, 0.001)
until = time.monotonic() + 60
rounds = 0
while (count < 60 or rounds < 8 or not refused) and time.monotonic() < until:
    rounds += 1
    lock = fenced_lock(f"body{rounds}", authority=authority, ttl=5)
    with lock:
        lock.remint()
signal.setitimer(signal.ITIMER_REAL, 0)
threads = sum(thread.name == "fencelock-renewal" and thread.is_alive() for thread in threading.enumerate())
said = {"handlers": count, "refused": sorted(refused), "rounds": rounds, "held": len(everything_held())}
print(json.dumps({**said, "threads": threads}))
"""


#: Strikes when a thread of ours has begun, while its starter is still in the midst of starting it.
_STRUCK_AT_THE_START = """
import os, faulthandler, redis
from fencelock import Redlock, fenced_lock
from fencelock._locking import default_authority

faulthandler.dump_traceback_later(30, exit=True)
name, urls = sys.argv[1], sys.argv[2:]
os.environ["FENCELOCK_URL"] = ",".join(urls)
said, started = [], []
starter = "_start_new_thread" if sys.version_info < (3, 13) else "_start_joinable_thread"
begin, start = getattr(threading, starter), threading.Thread.start

def note(thread):
    started.append(thread)
    start(thread)

def begin_and_strike(*arguments, **named):
    thread = begin(*arguments, **named)
    if started[-1].name.startswith(name) and not said:
        started[-1]._started.wait()
        said.append("struck")
        signal.raise_signal(signal.SIGUSR1)
    return thread

def handle(*_):
    raise Interrupted("soft time limit")

def use():
    lock = fenced_lock("r", ttl=0.9, timeout=5, if_lost="warn")
    with lock:
        if name == "fencelock-lost":
            _tell_apart([])
        if name == "fencelock-release":
            _release_in_thread(lock._entered[0].holds[0])

from fencelock.lock.releasing import _release_in_thread
from fencelock.lock.renewal import _tell_apart

signal.signal(signal.SIGUSR1, handle)
if name == "fencelock-recovery":
    redis.Redis.from_url(urls[0]).flushall()
threading.Thread.start = note
setattr(threading, starter, begin_and_strike)
for _ in range(100):
    try:
        use()
    except Interrupted as error:
        said += [str(error), error.__cause__, error.__context__, error.__suppress_context__]
    except BaseException as error:
        said.append(repr(error))
    if said:
        break
    time.sleep(0.01)
setattr(threading, starter, begin)
use()
print(json.dumps({"said": said}))
"""

#: Strikes once, where something is begun; the handler takes a lock, or raises if it is told to.
_STRUCK = """
import faulthandler, os, redis
from fencelock import Redlock, fenced_lock
from fencelock.authority.redlock.membership.members import MembershipView
from fencelock._locking import default_authority

faulthandler.dump_traceback_later(30, exit=True)
raises, where, urls = sys.argv[1] == "raises", sys.argv[2], sys.argv[3:]
os.environ["FENCELOCK_URL"] = ",".join(urls)
got, struck = [], []

def handle(*_):
    if raises:
        raise Interrupted
    try:
        with fenced_lock("handler", ttl=1, timeout=5) as token:
            got.append(token)
    except RuntimeError:
        got.append(0)

def strike():
    if not struck:
        struck.append(where)
        signal.raise_signal(signal.SIGUSR1)

def before(owner, name, applies=lambda *_: True):
    real = getattr(owner, name)
    def struck_first(*arguments, **named):
        if applies(*arguments):
            strike()
        return real(*arguments, **named)
    setattr(owner, name, struck_first)

signal.signal(signal.SIGUSR1, handle)
if where == "configure":
    before(Redlock, "begin_in_child")
elif where == "look":
    before(MembershipView, "_check_distinct")
elif where == "meet":
    before(MembershipView, "note")
else:
    with fenced_lock("warm", ttl=1):
        pass
    redis.Redis.from_url(urls[0]).flushall()
    before(threading.Thread, "start", lambda thread: thread.name == "fencelock-recovery")
while not struck:
    try:
        with fenced_lock("body", ttl=1, timeout=5) as token:
            got.append(token)
    except Interrupted:
        pass

def admitted():
    return all(node.state.name == "ADMITTED" for node in default_authority().status())

until = time.monotonic() + 20
while not admitted() and time.monotonic() < until:
    with fenced_lock("body", ttl=1, timeout=5) as token:
        got.append(token)
    time.sleep(0.1)
print(json.dumps({"struck": struck, "got": len(got), "admitted": admitted()}))
"""


def run(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program while it is interrupted; return what it printed last."""
    child = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED + program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    said: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return said


@pytest.mark.long
def test_nothing_is_left_of_a_block_that_was_interrupted(nodes: Nodes) -> None:
    urls = [node.url for node in nodes[:3]]
    with Redlock(urls) as authority:
        authority.init()
    said = run(_LOCKING, *urls)
    assert said["left"] == []
    assert said["threads"] <= 1
    assert said["interrupted"] > 300


def test_a_handler_that_locks_gets_a_lock_or_a_sentence(nodes: Nodes) -> None:
    """It waits for nothing that it has interrupted, also where renewal is planned."""
    urls = [node.url for node in nodes[:3]]
    with Redlock(urls) as authority:
        authority.init()
    said = run(_LOCKING_IN_HANDLERS, *urls)
    assert said["handlers"] > 50
    (sentence,) = said["refused"]
    assert "Set a flag in the handler" in sentence
    assert said["rounds"] > 5
    assert (said["held"], said["threads"]) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "where"),
    [
        ("locks", "configure"),
        ("locks", "look"),
        ("locks", "meet"),
        ("locks", "recover"),
        ("raises", "look"),
        ("raises", "recover"),
    ],
)
def test_a_handler_that_strikes_where_something_is_begun(nodes: Nodes, does: str, where: str) -> None:
    """It does not wait for what it has interrupted; and what it has broken off is begun again."""
    urls = [node.url for node in nodes[:3]]
    with Redlock(urls) as authority:
        authority.init(max_ttl=1)
    said = run(_STRUCK, does, where, *urls)
    assert said["struck"] == [where]
    assert said["got"] >= (2 if does == "locks" else 0)
    assert said["admitted"]


@pytest.mark.parametrize("name", ["renewal", "recovery", "connect", "lost", "release"])
def test_what_a_handler_raises_where_a_thread_has_begun_comes_out(nodes: Nodes, name: str) -> None:
    urls = [node.url for node in nodes[:3]]
    with Redlock(urls) as authority:
        authority.init(max_ttl=1)
    said = run(_STRUCK_AT_THE_START, f"fencelock-{name}", *urls)
    assert said["said"] == ["struck", "soft time limit", None, None, False]


def test_an_interruption_while_numbers_are_packed_does_not_end_the_interpreter() -> None:
    assert run(_PACKING)["interrupted"] == 300


def test_hiredis_is_handed_text_only(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: Callable[[Any], bytes] = hiredis.pack_command
    seen: list[object] = []

    def note(words: Any) -> bytes:
        seen.extend(words)
        return packed(words)

    monkeypatch.setattr(hiredis, "pack_command", note)
    pack(Command("acquire", "nonce", ("{fencelock}:n", "a"), (1, "two", 3)))
    pack(Command(SYNC.script, "", (), (1, 0, 100)))
    url = nodes[0].url.replace("?", "/3?") if "?" in nodes[0].url else f"{nodes[0].url}/3"
    with Redlock([url]) as authority:
        authority.init()
        with authority.lock("a"):
            pass
    assert len(seen) > 10
    assert all(isinstance(word, str | bytes) for word in seen)
    assert redis.Redis.from_url(url).dbsize()  # it was selected


def test_a_timeout_error_of_a_handler_does_not_shift_the_answers(nodes: Nodes) -> None:
    with Redlock([node.url for node in nodes[:3]]) as authority:
        authority.init(base=0)
        with authority.lock("a"):
            pass
        links = authority._connections._links
        for descriptor, link in list(links.items()):
            if link.node in {0, 1}:
                interrupted = cast("socket.socket", _InterruptedSocket(link.sock))
                links[descriptor] = link._replace(sock=interrupted)
        tokens = []
        for _ in range(5):
            with authority.lock("a", timeout=5) as token:
                tokens.append(token)
            with authority.lock("b", timeout=5) as token:
                assert token == len(tokens)
        assert tokens == sorted(set(tokens))


class _InterruptedSocket:
    """A socket that a handler interrupts when it has read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def recv(self, size: int) -> bytes:
        """Read, and raise."""
        self._sock.recv(size)
        raise TimeoutError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
