"""A process that ends gives its locks back, unless it is killed without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import redis
from uvicorn import Config, Server

from fencelock import Redlock, exit_on_signals
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY

pytestmark = pytest.mark.timed


@pytest.fixture
def urls(nodes: Nodes) -> list[str]:
    """Five initialised nodes."""
    with Redlock(nodes.urls) as authority:
        authority.init(base=0)
    return nodes.urls


def locked(urls: list[str]) -> int:
    """Return on how many nodes "r" is locked."""
    count = 0
    for url in urls:
        with redis.Redis.from_url(url) as client:
            count += client.exists(f"{NODE_KEY}:l:r")
    return count


def start(urls: list[str], program: str, first: str = ":") -> subprocess.Popen[str]:
    """Start a program that knows the nodes as `quorum`, and wait until it says that it holds the lock.

    Args:
        urls: the nodes.
        program: its text.
        first: what a shell does before it becomes the program.
    """
    prelude = (
        "import asyncio, os, signal, sys, threading, time\n"
        "import fencelock\n"
        "from fencelock import Redlock\n"
        f"quorum = Redlock({urls!r})\n"
    )
    command = [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(program)]
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'{first}; exec "$@"', "sh", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "held\n", line + (process.communicate()[1])
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the exit status, and what was written to stderr."""
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_lease_that_was_never_left_is_released_when_the_interpreter_exits(urls: list[str]) -> None:
    """By a script that just ends, and by sys.exit deep inside."""
    program = """
        lock = quorum.lock("r", ttl=60)
        lock.acquire()
        print("held", flush=True)
        time.sleep(0.5)
    """
    process = start(urls, program)
    assert locked(urls) >= 3
    assert end(process) == (0, "")
    assert eventually(lambda: locked(urls) == 0)  # the exit waits for a majority of the nodes only


def test_lease_of_a_task_that_was_never_left_is_released_when_the_interpreter_exits(urls: list[str]) -> None:
    """Though its loop is closed."""
    program = """
        lock = quorum.lock("r", ttl=60)
        async def main():
            await lock.aio.acquire()
            print("held", flush=True)
        quorum.status()
        asyncio.run(main())
    """
    assert end(start(urls, program)) == (0, "")
    assert eventually(lambda: locked(urls) == 0)  # the exit waits for a majority of the nodes only


@pytest.mark.complaint("pottery#274", "a lock that is never released crashes in `__del__` at shutdown")
def test_lease_of_a_lock_in_a_cycle_is_released_when_the_interpreter_exits(urls: list[str]) -> None:
    """Without a word, though half of the interpreter is gone when the cycle is."""
    program = """
        class Keeper:
            pass
        keeper = Keeper()
        keeper.itself, keeper.lock = keeper, quorum.lock("r", ttl=60)
        keeper.lock.acquire()
        print("held", flush=True)
    """
    assert end(start(urls, program)) == (0, "")
    assert eventually(lambda: locked(urls) == 0)


def test_sigterm_kills_by_default(urls: list[str]) -> None:
    """The control: no Python code is run, and the lock stays until its ttl."""
    process = start(urls, 'with quorum.lock("r", ttl=60):\n    print("held", flush=True)\n    time.sleep(30)')
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == -signal.SIGTERM
    assert locked(urls) >= 3


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        'with quorum.lock("r", ttl=60):\n    print("held", flush=True)\n    time.sleep(30)',
        'lock = quorum.lock("r", ttl=60)\nlock.acquire()\nprint("held", flush=True)\ntime.sleep(30)',
        (
            'async def main():\n    async with quorum.lock("r", ttl=60):\n        print("held", flush=True); '
            "await asyncio.sleep(30)\nasyncio.run(main())"
        ),
    ],
    ids=["with", "acquire", "async with"],
)
def test_sigterm_releases_where_it_was_asked_for(urls: list[str], body: str) -> None:
    """The process ends with the shell's status, having left its blocks."""
    process = start(urls, "fencelock.exit_on_signals()\n" + body)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM
    assert eventually(lambda: locked(urls) == 0)  # the exit waits for a majority of the nodes only


def test_sigint_leaves_the_blocks_by_itself(urls: list[str]) -> None:
    """KeyboardInterrupt is an exception like others."""
    process = start(urls, 'with quorum.lock("r", ttl=60):\n    print("held", flush=True)\n    time.sleep(30)')
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == -signal.SIGINT
    assert eventually(lambda: locked(urls) == 0)  # the exit waits for a majority of the nodes only


def test_end_is_not_delayed_by_nodes_that_hang(urls: list[str], nodes: Nodes) -> None:
    """Best effort: the process ends within seconds, and the leases by themselves."""
    program = """
        locks = [quorum.lock(f"r{number}", ttl=60) for number in range(50)]
        for lock in locks:
            lock.acquire()
        print("held", flush=True)
        sys.stdin.read(1)
    """
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom fencelock import Redlock\n"
            f"quorum = Redlock({urls!r}, node_timeout=0.3)\n" + textwrap.dedent(program),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    for node in nodes:
        node.pause()
    process.communicate("x", timeout=10)
    assert process.returncode == 0


def test_handler_of_the_program_is_respected() -> None:
    """It is not replaced; the error says what the handler has to do."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match=r"SIGUSR1 has a handler already.*sys\.exit"):
            exit_on_signals(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            exit_on_signals()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(failures[0])


def test_handler_of_a_server_stays() -> None:
    """It leaves the blocks by itself."""
    handler = Server(Config("none")).handle_exit
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        exit_on_signals(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_that_the_process_was_started_to_ignore_stays_ignored(urls: list[str]) -> None:
    """As nohup starts it: a log line says so, other signals end the process all the same."""
    program = """
        fencelock.exit_on_signals(signal.SIGTERM, signal.SIGHUP)
        lock = quorum.lock("r", ttl=60)
        lock.acquire()
        print("held", flush=True)
        time.sleep(30)
    """
    process = start(urls, program, "trap '' HUP")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    status, errors = end(process)
    assert status == 128 + signal.SIGTERM
    assert errors.startswith("SIGHUP stays ignored")
    assert eventually(lambda: locked(urls) == 0)  # the exit waits for a majority of the nodes only


def test_signals_may_be_named_twice() -> None:
    """Calling it again changes nothing."""
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent
        try:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has the tests ignore it
            exit_on_signals(signal.SIGTERM)
            exit_on_signals(signal.SIGTERM, signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        except SystemExit as error:
            os._exit(0 if error.code == 128 + signal.SIGHUP else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert eventually(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


def test_callback_that_never_returns_does_not_keep_the_process(urls: list[str]) -> None:
    """A lease was lost, and what hears of that waits for ever: the interpreter ends all the same."""
    program = """
        lock = quorum.lock("r", ttl=0.6, if_lost="warn")
        told = threading.Event()
        lock.on_lost(lambda lease: (told.set(), time.sleep(600)))
        lock.acquire()
        print("held", flush=True)
        quorum.force_release("r")
        assert told.wait(10)
    """
    assert end(start(urls, program)) == (0, "")


#: What holds the lock, or waits for it, in threads that the interpreter freezes when it ends.
DAEMONS = {
    "a block, with daemons that wait": """
        def work():
            with quorum.lock("r", timeout=None):
                time.sleep(60)
        with quorum.lock("r"):
            for _ in range(5):
                threading.Thread(target=work, daemon=True).start()
            time.sleep(0.4)
            print("held", flush=True)
    """,
    "a lock that is never left, with daemons that wait": """
        def work():
            with quorum.lock("r", timeout=None):
                time.sleep(60)
        lock = quorum.lock("r")
        lock.acquire()
        for _ in range(5):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.4)
        print("held", flush=True)
    """,
    "a daemon, with others that wait": """
        def work():
            with quorum.lock("r", timeout=None):
                time.sleep(60)
        for _ in range(6):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        print("held", flush=True)
    """,
    "daemons that take it in turn": """
        def work():
            while True:
                with quorum.lock("r"):
                    time.sleep(0.01)
        for _ in range(5):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        print("held", flush=True)
    """,
    "a loop in a daemon": """
        async def work():
            while True:
                async with quorum.lock("r", timeout=None):
                    await asyncio.sleep(0.01)
        async def main():
            await asyncio.gather(*(work() for _ in range(5)))
        threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
        time.sleep(0.5)
        print("held", flush=True)
    """,
}

#: What leaves a lock, or takes one, when the interpreter throws away what its modules have.
LATE = {
    "a generator": """
        def section():
            with quorum.lock("r"):
                yield
        kept = section()
        next(kept)
        print("held", flush=True)
    """,
    "a context manager": """
        from contextlib import contextmanager
        @contextmanager
        def section():
            with quorum.lock("r"):
                yield
        kept = section()
        kept.__enter__()
        print("held", flush=True)
    """,
    "an object that releases": """
        class Worker:
            def __init__(self):
                self.lock = quorum.lock("r")
                self.lock.acquire()
            def __del__(self):
                self.lock.release()
        kept = Worker()
        print("held", flush=True)
    """,
    "an object that locks": """
        class Worker:
            def __del__(self):
                try:
                    quorum.lock("r").acquire()
                except fencelock.LockError:
                    pass
        kept = Worker()
        with quorum.lock("r"):
            pass
        print("held", flush=True)
    """,
}


def end_soon_without_a_lock(urls: list[str], program: str) -> str:
    """Run a program to its end; return what was written to stderr."""
    process = start(urls, program)
    began = time.monotonic()
    status, errors = end(process)
    assert status == 0
    assert time.monotonic() - began < 3
    assert locked(urls) == 0
    return errors


@pytest.mark.long
@pytest.mark.parametrize("program", DAEMONS)
def test_no_lock_goes_to_a_thread_that_is_about_to_be_frozen(urls: list[str], program: str) -> None:
    """Its own waiters are given up first; what they have got all the same is given back, too."""
    end_soon_without_a_lock(urls, DAEMONS[program])


@pytest.mark.parametrize("program", LATE)
def test_what_is_thrown_away_at_last_neither_hangs_nor_locks(urls: list[str], program: str) -> None:
    """The interpreter starts no thread any more, and what was given back is not given back again."""
    assert end_soon_without_a_lock(urls, LATE[program]) == ""
