"""The rule of docs/redis.md gives a user all that fencelock needs, and no more."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState
from fencelock.errors import AuthorityError, LockLostError, QuorumError
from proof.servers import Node
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY
from tests.test_cli import fencelock

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"
PASSWORD = "secret"


def rule_of(admin: redis.Redis) -> list[str]:
    """Return the words of the rule, as the page tells to shorten it for this server."""
    found = re.search(r"^ACL SETUSER fencelock (.*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    words = found[1].replace("PASSWORD", PASSWORD).split()
    version = str(admin.info("server")["redis_version"])
    if tuple(map(int, version.split(".")[:2])) < (7, 2):
        words.remove("+waitaof")
    return words


def command(client: redis.Redis, *words: str) -> Any:
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


@pytest.fixture
def admin(any_server: Node) -> Iterator[redis.Redis]:
    """A user with all rights."""
    with redis.Redis.from_url(any_server.url, decode_responses=True) as client:
        yield client
        command(client, "ACL", "DELUSER", "fencelock")


def set_user(admin: redis.Redis, words: list[str]) -> None:
    """Give the user these rules, and none of the earlier ones."""
    command(admin, "ACL", "SETUSER", "fencelock", "reset", *words)
    command(admin, "ACL", "LOG", "RESET")


def refused(admin: redis.Redis) -> list[Any]:
    """Return what the user was refused, save the greeting of redis-py, which goes on without."""
    greeting = {"client|setinfo", "client"}  # before Redis 7, a log has no subcommands
    return [entry for entry in command(admin, "ACL", "LOG") if entry["object"] not in greeting]


def url_of(server: Node) -> str:
    """Return the user's URL."""
    return server.url.replace("redis://", f"redis://fencelock:{PASSWORD}@")


def use_everything(server: Node, admin: redis.Redis) -> None:
    """Do as that user all that programs do."""
    with Redlock(url_of(server)) as authority:
        authority.init(base=0, max_ttl=1)
        with authority.lock("r", ttl=0.5) as first, authority.lock("a", "b", ttl=0.5):
            time.sleep(0.6)  # it is renewed
            assert first == 1
        held = authority.lock("r", ttl=1)
        held.acquire()
        held.remint()
        held.extend(1)
        assert held.locked()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait, authority)
            time.sleep(0.3)
            held.release()
            waiting.result()
        held = authority.lock("r", ttl=0.5, renew=False)
        held.acquire()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(wait, authority).result()  # until its lease ends
        with pytest.raises(LockLostError):
            held.release()
        asyncio.run(crowd(authority))
        admin.hset(NODE_KEY, "r", "0" * 40)  # as after a restart with all data
        assert eventually(lambda: votes_again(authority))
        assert [status.state for status in authority.status()] == [NodeState.ADMITTED]


def wait(authority: Redlock) -> None:
    """Stand in line for a lock, in a thread of its own."""
    with authority.lock("r", ttl=1, timeout=5):
        pass


async def crowd(authority: Redlock) -> None:
    """Lock much at one time, and one thing so that tasks stand in line."""

    async def one(resource: str) -> None:
        async with authority.lock(resource, ttl=1, timeout=10):
            await asyncio.sleep(0.001)

    await asyncio.gather(*(one(f"m{number % 40}") for number in range(80)))


def votes_again(authority: Redlock) -> bool:
    """Whether the node has been admitted again."""
    with suppress(AuthorityError), authority.lock("r", ttl=0.5, timeout=1):
        return True
    return False


def test_rule_is_enough(any_server: Node, admin: redis.Redis) -> None:
    """The server refuses nothing, not even in silence."""
    set_user(admin, rule_of(admin))
    use_everything(any_server, admin)
    assert refused(admin) == []


@pytest.mark.timed
def test_rule_has_no_word_too_many(any_server: Node, admin: redis.Redis) -> None:
    """Of all commands that it allows, each is used."""
    words = rule_of(admin)
    set_user(admin, words)
    admin.config_resetstat()
    use_everything(any_server, admin)
    told: Any = admin.info("commandstats")
    used = {name.removeprefix("cmdstat_").partition("|")[0] for name in told}
    allowed = {word[1:].partition("|")[0] for word in words if word.startswith("+")}
    assert allowed - used == set()


def test_rule_reaches_no_other_key(any_server: Node, admin: redis.Redis) -> None:
    """Also not by a script."""
    set_user(admin, rule_of(admin))
    admin.set("{fencelock}x", "mine")
    with redis.Redis.from_url(url_of(any_server)) as client:
        for make_attempt in (
            lambda: client.get("{fencelock}x"),
            lambda: client.set("cache", "1"),
            lambda: client.eval("return redis.call('GET', KEYS[1])", 1, "{fencelock}x"),
            client.flushall,
            lambda: client.keys("*"),
            lambda: client.config_get("maxmemory"),
        ):
            with pytest.raises(redis.ResponseError):
                make_attempt()


def test_operator_needs_scan_as_well(any_server: Node, admin: redis.Redis) -> None:
    """The operator needs it to delete the remains of a loss."""
    set_user(admin, [*rule_of(admin), "+scan"])
    with Redlock(url_of(any_server)) as authority:
        authority.init(base=0, max_ttl=1)
        authority.acquire(("r",), ttl=1, timeout=0)
        admin.hset(NODE_KEY, "r", "0" * 40)
        assert authority.remains()
        assert authority.clear() >= 3
    assert fencelock("init", url_of(any_server)).returncode == 0
    assert refused(admin) == []


def test_missing_right_is_named(any_server: Node, admin: redis.Redis) -> None:
    """The advice for nodes that are away would not help."""
    words = rule_of(admin)
    set_user(admin, words)
    with Redlock(url_of(any_server)) as authority:
        authority.init()
        with pytest.raises(
            QuorumError, match=r"lacks the right \+scan .*; give the user that right"
        ) as refused:
            authority.inspect()
        assert "mend their URLs" not in str(refused.value)
        set_user(admin, [word for word in words if word != "+object|encoding"])
        with pytest.raises(QuorumError, match=r"lacks the right \+object\|encoding "):
            authority.lock("r", timeout=0).acquire()
