"""A process that ends gives its locks back, unless it is killed without a word."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import redis
from uvicorn import Config, Server

from fencelock import Database, Redlock, exit_on_signals
from fencelock._generators import Steps
from fencelock.authority.base import Grant
from fencelock.lock.at_exit import _give_back_everything
from fencelock.lock.hold import everything_held
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY


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


def is_free_soon(urls: list[str]) -> bool:
    """Return whether no node keeps it: the exit waits for a majority of the nodes only."""
    return eventually(lambda: locked(urls) == 0, 20)


def start(urls: list[str], program: str, first: str = ":", **options: float) -> subprocess.Popen[str]:
    """Start a program that knows the nodes as `quorum`, and wait until it has said that it holds the lock.

    Args:
        urls: the nodes.
        program: its text; it calls `say` when it holds the lock.
        first: what a shell does before it becomes the program.
        options: of the Redlock.
    """
    prelude = (
        "import asyncio, os, signal, sys, threading, time\n"
        "import fencelock\n"
        "from fencelock import Redlock\n"
        f"quorum = Redlock({urls!r}, **{options!r})\n"
        'say = lambda: print("held", flush=True)\n'
        "def stay():\n"  # a signal just before one long sleep would not interrupt it
        "    for _ in range(600): time.sleep(0.1)\n"
    )
    command = [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(program)]
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'{first}; exec "$@"', "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "held\n", line + (process.communicate()[1])
    return process


def end(process: subprocess.Popen[str], seconds: float = 30.0) -> tuple[int, str]:
    """Wait for the end; return the exit status, and what was written to stderr."""
    _, errors = process.communicate("x", timeout=seconds)
    return process.returncode, errors


HANDLED = "fencelock.exit_on_signals()"
WITH = 'with quorum.lock("r", ttl=60):\n    say()\n    stay()'
ACQUIRE = 'lock = quorum.lock("r", ttl=60)\nlock.acquire()\nsay()\nstay()'
ASYNC_WITH = """
async def main():
    async with quorum.lock("r", ttl=60):
        say()
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("program", "sent", "status", "stays"),
    [
        pytest.param(WITH, signal.SIGTERM, -signal.SIGTERM, True, id="no Python code is run by default"),
        pytest.param(WITH, signal.SIGINT, -signal.SIGINT, False, id="Ctrl-C leaves the block"),
        *(
            pytest.param(
                f"fencelock.exit_on_signals()\n{body}", signal.SIGTERM, 128 + signal.SIGTERM, False, id=name
            )
            for name, body in (("with", WITH), ("acquire", ACQUIRE), ("async with", ASYNC_WITH))
        ),
    ],
)
def test_a_signal_releases_where_it_was_asked_for(
    urls: list[str], program: str, sent: signal.Signals, status: int, *, stays: bool
) -> None:
    process = start(urls, program)
    process.send_signal(sent)
    assert end(process)[0] == status
    assert locked(urls) >= 3 if stays else is_free_soon(urls)


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("body", [WITH, ACQUIRE, ASYNC_WITH], ids=["with", "acquire", "async with"])
def test_signals_that_come_again_change_neither_status_nor_locks(
    urls: list[str], body: str, pause: float
) -> None:
    process = start(urls, f"fencelock.exit_on_signals()\n{body}")
    for _ in range(4):
        process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    assert end(process) == (128 + signal.SIGTERM, "")
    assert is_free_soon(urls)


def test_another_signal_changes_nothing_while_the_first_ends_the_process(urls: list[str]) -> None:
    program = """
        fencelock.exit_on_signals(signal.SIGTERM, signal.SIGUSR1)
        with quorum.lock("r", ttl=60):
            try:
                say()
                time.sleep(60)
            finally:
                say()
                time.sleep(0.5)
    """
    process = start(urls, program)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGUSR1)
    assert end(process) == (128 + signal.SIGTERM, "")
    assert is_free_soon(urls)


def test_end_of_a_loop_releases_what_its_tasks_have_left(tmp_path: Path) -> None:
    """Only the loop can: the driver is for coroutines."""
    with Database(f"sqlite:///{tmp_path}/leases") as seen:
        seen.init()
        authority = Database(f"sqlite+aiosqlite:///{tmp_path}/leases")
        lock = authority.lock("r", ttl=60)

        async def main() -> None:
            await lock.aio.acquire()
            assert await authority.aio.inspect("r")

        asyncio.run(main())
        assert seen.inspect() == []


def test_close_in_a_loop_waits_for_cancelled_tasks_and_takes_nothing_from_others(tmp_path: Path) -> None:
    with Database(f"sqlite:///{tmp_path}/leases") as seen:
        seen.init()
        authority = Database(f"sqlite+aiosqlite:///{tmp_path}/leases")

        async def hold(name: str) -> None:
            async with authority.lock(name, ttl=60):
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0.05)  # as a session that rolls back

        async def main() -> None:
            cancelled, runs = asyncio.create_task(hold("a")), asyncio.create_task(hold("b"))
            async with authority.lock("c"):
                assert await asyncio.to_thread(eventually, lambda: len(seen.inspect()) == 3)
                cancelled.cancel()
                await authority.aio.close()
                assert [each.resource for each in seen.inspect()] == ["b", "c"]
            runs.cancel()

        asyncio.run(main())
        assert seen.inspect() == []


@pytest.mark.timed
def test_the_end_is_not_delayed_by_nodes_that_hang(urls: list[str], nodes: Nodes) -> None:
    program = """
        locks = [quorum.lock(f"r{number}", ttl=60) for number in range(50)]
        for lock in locks:
            lock.acquire()
        say()
        sys.stdin.read(1)
    """
    process = start(urls, program, node_timeout=1.0)
    for node in nodes:
        node.pause()
    assert end(process, 25)[0] == 0


def test_handler_of_the_program_is_respected() -> None:
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
    handler = Server(Config("none")).handle_exit
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        exit_on_signals(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored(urls: list[str]) -> None:
    ignoring = "fencelock.exit_on_signals(signal.SIGTERM, signal.SIGHUP)\n" + ACQUIRE
    process = start(urls, ignoring, "trap '' HUP")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    status, errors = end(process)
    assert status == 128 + signal.SIGTERM
    assert errors.startswith("SIGHUP stays ignored")
    assert is_free_soon(urls)


def test_signals_may_be_named_twice() -> None:
    before = signal.getsignal(signal.SIGTERM)  # another test's server may handle it
    child = os.fork()
    if not child:  # pragma: no cover - measured in the parent
        try:
            for number in (signal.SIGTERM, signal.SIGHUP):  # nohup has the tests ignore the second
                signal.signal(number, signal.SIG_DFL)
            exit_on_signals(signal.SIGTERM)
            exit_on_signals(signal.SIGTERM, signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        except SystemExit as error:
            os._exit(0 if error.code == 128 + signal.SIGHUP else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert signal.getsignal(signal.SIGTERM) == before


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
            say()
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
        say()
    """,
    "a daemon, with others that wait": """
        def work():
            with quorum.lock("r", timeout=None):
                time.sleep(60)
        for _ in range(6):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        say()
    """,
    "daemons that take it in turn": """
        def work():
            while True:
                with quorum.lock("r"):
                    time.sleep(0.01)
        for _ in range(5):
            threading.Thread(target=work, daemon=True).start()
        time.sleep(0.5)
        say()
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
        say()
    """,
}

#: Programs that end while they hold a lock, or leave it when the interpreter throws away its modules.
ENDINGS = {
    "a lock that was never left": """
        lock = quorum.lock("r", ttl=60)
        lock.acquire()
        say()
    """,
    "a lock of a task, whose loop is closed": """
        lock = quorum.lock("r", ttl=60)
        async def main():
            await lock.aio.acquire()
            say()
        quorum.status()
        asyncio.run(main())
    """,
    "a child of multiprocessing": """
        import multiprocessing
        lock = quorum.lock("r", ttl=60)
        child = multiprocessing.get_context("fork").Process(target=lock.acquire)
        child.start()
        child.join()
        assert child.exitcode == 0
        say()
    """,
    "a callback that never returns": """
        lock = quorum.lock("r", ttl=0.6, if_lost="warn")
        told = threading.Event()
        lock.on_lost(lambda lease: (told.set(), time.sleep(600)))
        lock.acquire()
        say()
        quorum.force_release("r")
        assert told.wait(30)
    """,
    "a generator": """
        def section():
            with quorum.lock("r"):
                yield
        kept = section()
        next(kept)
        say()
    """,
    "a context manager": """
        from contextlib import contextmanager
        @contextmanager
        def section():
            with quorum.lock("r"):
                yield
        kept = section()
        kept.__enter__()
        say()
    """,
    "an object that releases": """
        class Worker:
            def __init__(self):
                self.lock = quorum.lock("r")
                self.lock.acquire()
            def __del__(self):
                self.lock.release()
        kept = Worker()
        say()
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
        say()
    """,
}


@pytest.mark.long
@pytest.mark.parametrize("program", DAEMONS)
def test_no_lock_goes_to_a_thread_that_is_about_to_be_frozen(urls: list[str], program: str) -> None:
    assert end(start(urls, DAEMONS[program])) == (0, "")
    assert locked(urls) == 0


def test_a_daemon_that_leaves_its_block_while_the_end_releases_has_lost_nothing(urls: list[str]) -> None:
    """Both releases are under way, and one of them finds nothing."""
    sent, left = threading.Event(), threading.Event()
    with Redlock(urls) as authority:
        lock = authority.lock("r")
        lock.acquire()
        (hold,) = everything_held()
        give_back = hold.give_back

        def slowly(grant: Grant) -> Steps[bool | None]:
            hold.give_back = give_back  # of the other release
            released = yield from give_back(grant)
            sent.set()
            assert left.wait(30)
            return released

        hold.give_back = slowly
        end = threading.Thread(target=_give_back_everything)
        end.start()
        assert sent.wait(30)
        lock.release()
        left.set()
        end.join(30)
        assert locked(urls) == 0


@pytest.mark.parametrize("program", ENDINGS)
def test_what_is_held_at_the_end_is_given_back_once(urls: list[str], program: str) -> None:
    assert end(start(urls, ENDINGS[program])) == (0, "")
    assert is_free_soon(urls)


@pytest.mark.complaint("pottery#274", "a lock that is never released crashes in `__del__` at shutdown")
def test_lease_of_a_lock_in_a_cycle_is_released_when_the_interpreter_exits(urls: list[str]) -> None:
    """Without a word, though half of the interpreter is gone when the cycle is."""
    program = """
        class Keeper:
            pass
        keeper = Keeper()
        keeper.itself, keeper.lock = keeper, quorum.lock("r", ttl=60)
        keeper.lock.acquire()
        say()
    """
    assert end(start(urls, program)) == (0, "")
    assert is_free_soon(urls)
