"""Each greenlet owns its holds: under gevent, patched or not, and in Celery's pools.

Each program runs in a process of its own, because a patch stays for the whole process.
"""

from __future__ import annotations

import _thread
import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import greenlet
import pytest
import redis
from sqlalchemy.util import greenlet_spawn

from fencelock import Redlock
from fencelock._owners import current_owner
from fencelock.errors import LockTimeoutError
from proof.servers import Nodes, Postgres
from tests.polling import eventually

GEVENT = {
    "all": "from gevent import monkey; monkey.patch_all()",
    "threads unpatched": "from gevent import monkey; monkey.patch_all(thread=False)",
    "sockets only": "from gevent import monkey; monkey.patch_socket()",
    "nothing": "",
}
LETS_RUN = [GEVENT["all"], GEVENT["threads unpatched"]]
BLOCKS = [GEVENT["sockets only"], GEVENT["nothing"]]

TOGETHER = """
def together(*functions):
    import gevent
    gevent.joinall([gevent.spawn(function) for function in functions], raise_error=True)

def pause(seconds):
    import gevent
    gevent.sleep(seconds)
"""


@pytest.fixture
def quorum(nodes: Nodes) -> Iterator[Redlock]:
    """A client of five initialised nodes."""
    with Redlock(nodes.urls) as authority:
        authority.init(base=0)
        yield authority


def run(nodes: Nodes, patch: str, program: str) -> list[str]:
    """Run a program that knows the nodes as `quorum`; return the lines that it prints."""
    prelude = (
        f"{patch}\n"
        "import sys, time\n"
        "from fencelock import Redlock\n"
        "from fencelock.errors import *\n"
        f"{TOGETHER}\n"
        f"quorum = Redlock({nodes.urls!r})\n"
        "quorum.init()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_hold_of_a_thread_that_threading_has_not_started_is_nobody_elses(quorum: Redlock) -> None:
    kept, idents, tokens = [], [], []
    ended = threading.Semaphore(0)

    def first() -> None:
        lock = quorum.lock("r", ttl=30)
        kept.append((lock, lock.acquire().token))
        idents.append(_thread.get_ident())
        ended.release()

    def other() -> None:
        lock = quorum.lock("r", ttl=30)
        lease = lock.try_acquire()
        tokens.append(None if lease is None else lease.token)
        idents.append(_thread.get_ident())
        ended.release()

    _thread.start_new_thread(first, ())
    ended.acquire()
    for _ in range(50):
        _thread.start_new_thread(other, ())
        ended.acquire()
    assert tokens == [None] * 50
    assert len(set(idents)) < len(idents)  # or nothing has been tested
    kept[0][0].release()


def test_greenlets_of_one_thread_are_different_owners_and_the_first_one_is_the_thread() -> None:
    here = current_owner()
    one, other = (greenlet.greenlet(lambda: (current_owner(), current_owner())) for _ in range(2))
    first, again = one.switch()
    assert first == again
    assert len({here, first, other.switch()[0]}) == 3
    assert current_owner() == here


def test_an_owner_keeps_no_greenlet_alive_and_is_no_later_one() -> None:
    owners: list[Any] = [greenlet.greenlet(current_owner).switch() for _ in range(100)]
    assert all(owner() is None for owner in owners)
    assert [owners.index(owner) for owner in owners] == list(range(100))


def test_greenlets_of_sqlalchemy_belong_to_their_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a lock is entered again by what an AsyncSession runs; with gevent there as well."""

    async def main() -> None:
        owner = current_owner()
        assert await greenlet_spawn(current_owner) == owner
        assert await asyncio.create_task(_owner()) != owner
        assert current_owner() == owner

    async def _owner() -> object:
        return current_owner()

    asyncio.run(main())
    monkeypatch.setitem(sys.modules, "gevent", sys.modules[__name__])
    asyncio.run(main())


def test_greenlet_that_runs_while_a_task_waits_is_not_that_task() -> None:
    def ask_twice() -> object:
        parent = greenlet.getcurrent().parent
        assert parent is not None
        parent.switch(current_owner())
        return current_owner()

    other = greenlet.greenlet(ask_twice)

    async def main() -> tuple[object, object]:
        return current_owner(), other.switch()

    task, of_other = asyncio.run(main())
    assert task != of_other
    assert other.switch() == of_other


def test_thread_that_goes_on_while_a_greenlets_task_waits_is_not_that_task() -> None:
    """As a Celery task may run a loop in its greenlet, in which something waits by means of gevent.

    Libraries that make an asynchronous interface a blocking one do so by greenlet alone.
    """
    here, main = current_owner(), greenlet.getcurrent()

    async def ask() -> None:
        main.switch(current_owner())

    runner = greenlet.greenlet(lambda: asyncio.run(ask()))
    assert runner.switch() != here
    assert current_owner() == here
    runner.switch()


def test_greenlet_waits_for_what_the_rest_of_its_thread_holds(quorum: Redlock) -> None:
    with quorum.lock("r") as token:
        waiting = greenlet.greenlet(quorum.lock("r").acquire)
        with pytest.raises(LockTimeoutError, match=r"is held by .+ since 20"):
            waiting.switch(timeout=0)
        with quorum.lock("r") as again:
            assert again == token


@pytest.mark.parametrize("patch", LETS_RUN)
def test_greenlets_take_turns(nodes: Nodes, patch: str) -> None:
    """Each greenlet has a token of its own, and no two are inside at once.

    A waiting greenlet lets others run.
    """
    seen = run(
        nodes,
        patch,
        """
        inside, tokens, ticks = [], [], 0

        def work():
            for _ in range(3):
                with quorum.lock("r", ttl=5, timeout=60) as token:
                    assert not inside
                    inside.append(token)
                    tokens.append(token)
                    with quorum.lock("r") as again:
                        assert again == token
                    pause(0.01)
                    inside.remove(token)

        def tick():
            global ticks
            while len(tokens) < 18:
                ticks += 1
                pause(0.005)

        together(tick, *[work] * 6)
        assert tokens == sorted(set(tokens)), tokens
        print(len(tokens), ticks > 10)
        """,
    )
    assert seen == ["18 True"]


@pytest.mark.long
def test_timeouts_and_kills_strike_while_connections_open(nodes: Nodes) -> None:
    """A thousand of each, at any switch: nothing else comes out, and nothing is left."""
    seen = run(
        nodes,
        GEVENT["all"],
        """
        import gevent, random
        dice, odd, struck = random.Random(5), [], {"timeout": 0, "kill": 0}
        end = time.monotonic() + 40

        def take(name):
            with quorum.lock(name, ttl=5, timeout=2):
                pause(0)

        def guarded(name):
            try:
                take(name)
            except (AuthorityError, LockTimeoutError):
                pass
            except Exception as error:
                odd.append(repr(error))

        def with_timeouts(number):
            while struck["timeout"] < 1000 and time.monotonic() < end:
                with gevent.Timeout(dice.uniform(0, 0.01), False):
                    guarded(f"t{number}")
                    continue
                struck["timeout"] += 1

        def with_kills(number):
            while struck["kill"] < 1000 and time.monotonic() < end:
                greenlet = gevent.spawn(guarded, f"k{number}")
                pause(dice.uniform(0, 0.01))
                struck["kill"] += not greenlet.ready()
                greenlet.kill()

        def close():
            while min(struck.values()) < 1000 and time.monotonic() < end:
                quorum.close()
                pause(0.02)

        workers = [gevent.spawn(work, number) for number in range(20) for work in (with_timeouts, with_kills)]
        workers.append(gevent.spawn(close))
        gevent.joinall(workers, raise_error=True)
        for number in range(20):
            for name in (f"t{number}", f"k{number}"):
                with quorum.lock(name, ttl=5, timeout=10):
                    pass
        print(*sorted(set(odd)), min(struck.values()) > 300)
        """,
    )
    assert seen == ["True"]


@pytest.mark.parametrize("patch", BLOCKS)
def test_greenlet_that_blocks_its_thread_never_shares_a_token(nodes: Nodes, patch: str) -> None:
    seen = run(
        nodes,
        patch,
        """
        def hold():
            with quorum.lock("r", ttl=5):
                print("in")
                pause(0.1)
            print("out")

        def wait():
            for timeout in (0.3, 0):
                try:
                    with quorum.lock("r", timeout=timeout):
                        print("shared")
                except LockTimeoutError as error:
                    print(error.holder_ttl > 0)

        together(hold, wait)
        with quorum.lock("r", timeout=0):
            print("free")
        """,
    )
    assert seen == ["in", "True", "True", "out", "free"]


@pytest.mark.long
@pytest.mark.parametrize("patch", [*LETS_RUN, *BLOCKS])
@pytest.mark.timed
def test_greenlets_hold_is_renewed_and_not_entered_by_another_when_it_has_ended(
    nodes: Nodes, patch: str
) -> None:
    seen = run(
        nodes,
        patch,
        """
        kept = []

        def work():
            with quorum.lock("renewed", ttl=1.2) as token:
                pause(2)
            print("renewed")

        def leave():
            lock = quorum.lock("left", ttl=60)
            lock.acquire()
            kept.append(lock)

        def take():
            try:
                with quorum.lock("left", timeout=0):
                    print("taken")
            except LockTimeoutError:
                pass

        together(work)
        together(leave)
        for _ in range(20):
            together(take)
        kept[0].release()
        together(take)
        """,
    )
    assert seen == ["renewed", "taken"]


def test_no_update_is_lost_between_greenlets(nodes: Nodes, postgres: Postgres) -> None:
    url = postgres.create_database()
    seen = run(
        nodes,
        GEVENT["all"],
        f"""
        from fencelock import FencedModel, claim
        from sqlalchemy import create_engine
        from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

        class Base(DeclarativeBase):
            pass

        class Account(FencedModel, Base):
            __tablename__ = "accounts"
            __fence_resource__ = "account:{{id}}"
            id: Mapped[int] = mapped_column(primary_key=True)
            balance: Mapped[int]

        engine = create_engine({url!r}, pool_size=10)
        Base.metadata.create_all(engine)
        with quorum.lock("account:1"), Session(engine) as session:
            session.add(Account(id=1, balance=0))
            session.commit()

        def deposit():
            with quorum.lock("account:1", timeout=60), Session(engine) as session:
                account = claim(session, Account, 1)
                balance = account.balance
                session.commit()
                pause(0.02)
                account.balance = balance + 10
                session.commit()

        together(*[deposit] * 10)
        with Session(engine) as session:
            print(session.get_one(Account, 1).balance)
        engine.dispose()
        """,
    )
    assert seen == ["100"]


@pytest.mark.long
@pytest.mark.parametrize("pool", ["gevent", "prefork", "threads"])
def test_tasks_of_a_celery_worker_take_turns(
    nodes: Nodes, quorum: Redlock, tmp_path: Path, pool: str
) -> None:
    broker = nodes.urls[0]
    (tmp_path / "shop.py").write_text(
        textwrap.dedent(
            f"""
            import time
            import redis
            from celery import Celery
            from fencelock import Redlock

            app = Celery("shop", broker={broker!r}, broker_connection_retry_on_startup=True)
            quorum = Redlock({nodes.urls!r})
            with quorum.lock("at import"):
                pass

            @app.task(ignore_result=True)
            def work():
                with quorum.lock("shop", ttl=5, timeout=60) as token:
                    client = redis.Redis.from_url({broker!r})
                    inside = client.incr("inside")
                    time.sleep(0.05)
                    client.decr("inside")
                    client.rpush("done", f"{{token}} {{inside}}")
                    client.close()
            """
        )
    )
    log = tmp_path / "log"
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-P", pool, "-c", "4", "-l", "INFO"]
    with log.open("w") as output:
        worker = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output)
    try:
        send = "import shop; [shop.work.delay() for _ in range(20)]"
        subprocess.run([sys.executable, "-c", send], cwd=tmp_path, check=True, timeout=60)
        with redis.Redis.from_url(broker, decode_responses=True) as client:
            assert eventually(lambda: client.llen("done") == 20, 60)
            done = [tuple(map(int, line.split())) for line in client.lrange("done", 0, -1)]
    except BaseException as error:
        error.add_note(log.read_text())
        raise
    finally:
        worker.terminate()
        worker.wait(timeout=30)
    assert [inside for _, inside in done] == [1] * 20
    tokens = [token for token, _ in done]
    assert tokens == sorted(set(tokens))
    with quorum.lock("shop", timeout=0):
        pass
