"""`authority.inspect()` shows the holder of each lock, on nodes and databases, blocking and with asyncio."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from fencelock import QuorumError, Redlock
from fencelock._owners import name_of_process
from fencelock.holder import Holder
from proof.servers import Nodes
from tests.authorities.kinds import Kind
from tests.observe.conftest import TWO_KINDS
from tests.polling import IMPATIENT, eventually
from tests.redlock.stage import NODE_KEY


def test_lock_names_its_holder(mine: Any, other: Any) -> None:
    """Host, process, program; the token, since when, and for how long still."""
    began = time.time()
    with mine.lock("order:1", ttl=20) as token:
        info = other.inspect("order:1")
    assert info.resource == "order:1"
    assert info.token == token
    assert info.holder == Holder.of(name_of_process(os.getpid()), info.holder.since)
    assert info.holder.pid == os.getpid()
    assert began - 1 < info.holder.since < time.time() + 1
    assert 5 < info.remaining <= 20
    assert other.inspect("order:1") is None
    lock = mine.lock("order:1", ttl=5)
    with lock:
        again = lock.remint()
        lock.extend(30)
        info = other.inspect("order:1")
    assert (info.token, info.holder.pid) == (again, os.getpid())
    assert 5 < info.remaining <= 30


@TWO_KINDS
def test_another_process_has_its_own_name_and_id(kind: Kind, other: Any, tmp_path: Path) -> None:
    (tmp_path / "billing.py").write_text(
        "import sys, fencelock\n"
        "fencelock.configure(sys.argv[1])\n"
        "with fencelock.fenced_lock('order:1'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, str(tmp_path / "billing.py"), kind.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        info = other.inspect("order:1")
        child.communicate()
    assert (info.holder.program, info.holder.pid) == ("billing.py", child.pid)
    assert info.holder.host == name_of_process(os.getpid()).split()[0]


def test_time_that_no_calendar_has() -> None:
    """Another program may have written any number."""
    assert (
        str(Holder.of("web-3 4711 shop.py", 1e20)) == "shop.py (process 4711 on web-3) since an unknown time"
    )


def test_all_that_is_held(mine: Any, other: Any) -> None:
    assert other.inspect() == []
    names = ["order:1", "order:2", "ünïcode {} * ? [x] \\ 'quoted'", "z" * 255]
    with mine.lock(*reversed(names)) as tokens:
        found = other.inspect()
    assert [info.resource for info in found] == sorted(names)
    granted = dict(zip(reversed(names), tokens, strict=True))
    assert {info.resource: info.token for info in found} == granted
    assert other.inspect() == []


@TWO_KINDS
def test_in_a_task(mine: Any, other: Any) -> None:
    async def main() -> None:
        async with mine.lock("order:1") as token:
            info = await other.aio.inspect("order:1")
            assert info is not None
            assert info.token == token
            assert [each.resource for each in await other.aio.inspect()] == ["order:1"]
        assert await other.aio.inspect("order:1") is None
        for authority in (mine, other):
            await authority.aio.close()

    asyncio.run(main())


# Nodes only.


def test_those_that_wait_are_counted(authority: Redlock, rival: Redlock) -> None:
    def work() -> None:
        with authority.lock("order:1", timeout=20):
            pass

    waiting = [threading.Thread(target=work) for _ in range(3)]
    with rival.lock("order:1"):
        for thread in waiting:
            thread.start()
        assert eventually(lambda: (info := rival.inspect("order:1")) is not None and info.waiters == 3)
    for thread in waiting:
        thread.join()


def test_lock_that_is_left_on_a_minority_is_free(authority: Redlock, node_urls: list[str]) -> None:
    with authority.lock("order:0"):
        pass
    with redis.Redis.from_url(node_urls[0]) as node:
        node.set(f"{NODE_KEY}:l:order:1", "f" * 43 + "|0|7", px=5000)
    assert authority.inspect("order:1") is None
    assert authority.inspect() == []


def test_key_that_something_else_has_written(authority: Redlock, node_urls: list[str]) -> None:
    with authority.lock("order:0"):
        pass
    for url in node_urls:
        with redis.Redis.from_url(url) as node:
            node.set(f"{NODE_KEY}:l:order:1", "mine!")
    info = authority.inspect("order:1")
    assert info is not None
    assert (info.token, info.holder, info.remaining) == (None, None, math.inf)


def test_minority_of_nodes_is_gone(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(3)
    with Redlock(nodes.urls, **IMPATIENT) as authority:
        authority.init()
        with authority.lock("order:1") as token:
            nodes[0].kill()
            info = authority.inspect("order:1")
            assert info is not None
            assert info.token == token
            nodes[1].kill()
            with pytest.raises(QuorumError):
                authority.inspect("order:1")


def test_node_that_has_forgotten_the_client(authority: Redlock, rival: Redlock, node_urls: list[str]) -> None:
    with authority.lock("order:1") as token:
        for forgotten in range(5):
            info = rival.inspect("order:1")
            assert info is not None
            assert info.holder is not None
            with redis.Redis.from_url(node_urls[forgotten]) as node:
                assert node.delete(*node.keys(f"{NODE_KEY}:w:*")) == 1
        info = rival.inspect("order:1")
        assert info is not None
        assert info.holder is not None
        assert (info.token, info.holder.host) == (token, "")
        assert str(info.holder).startswith("an unknown process since 20")


def test_many_locks_take_pages(authority: Redlock, node_urls: list[str]) -> None:
    """Ten thousand are found, and no script has looked at all."""
    with authority.lock("order:0"):
        pass
    for url in node_urls:
        with redis.Redis.from_url(url) as node, node.pipeline() as pipe:
            for number in range(10_000):
                pipe.set(f"{NODE_KEY}:l:order:{number}", "f" * 43 + f"|0|{number + 1}", px=600_000)
            pipe.execute()
            node.config_resetstat()
    found = authority.inspect()
    assert [info.token for info in found if info.resource == "order:77"] == [78]
    assert len(found) == 10_000
    for url in node_urls:
        with redis.Redis.from_url(url) as node:
            assert node.info("commandstats")["cmdstat_evalsha"]["calls"] > 20
