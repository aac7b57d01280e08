"""The rule of docs/redis.md gives a user all that fencelock needs, and no more."""

from __future__ import annotations

import asyncio
import re
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
from tests.redlock.views import waiting_on
from tests.test_cli import fencelock

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"
PASSWORD = "secret"
ONE_SERIES = pytest.mark.parametrize("server_program", ["valkey-8"], indirect=True)


def command(client: redis.Redis, *words: str) -> Any:
    return client.execute_command(*words)  # type: ignore[no-untyped-call]


class Acl:
    """A server, an administrator, and the user of the page.

    Attributes:
        rule: the words of the rule, as the page tells to shorten it for this server.
    """

    def __init__(self, server: Node) -> None:
        self.url = server.url.replace("redis://", f"redis://fencelock:{PASSWORD}@")
        self.admin = redis.Redis.from_url(server.url, decode_responses=True)
        found = re.search(r"^ACL SETUSER fencelock (.*)$", PAGE.read_text(), re.MULTILINE)
        assert found is not None
        self.rule = found[1].replace("PASSWORD", PASSWORD).split()
        facts: Any = self.admin.info("server")
        if tuple(map(int, facts["redis_version"].split(".")[:2])) < (7, 2):
            self.rule.remove("+waitaof")
        self.allow(self.rule)

    def allow(self, words: list[str]) -> None:
        command(self.admin, "ACL", "SETUSER", "fencelock", "reset", *words)
        command(self.admin, "ACL", "LOG", "RESET")

    def refused(self) -> list[Any]:
        """Return what the user was refused, save the greeting of redis-py, which goes on without."""
        greeting = {"client|setinfo", "client"}  # before Redis 7, a log has no subcommands
        return [entry for entry in command(self.admin, "ACL", "LOG") if entry["object"] not in greeting]


@pytest.fixture
def acl(any_server: Node) -> Iterator[Acl]:
    made = Acl(any_server)
    yield made
    command(made.admin, "ACL", "DELUSER", "fencelock")
    made.admin.close()


def use_everything(url: str, admin: redis.Redis, admin_url: str) -> None:
    with Redlock(url) as authority, ThreadPoolExecutor(1) as pool:
        authority.init(base=0, max_ttl=1)

        def wait() -> None:
            with authority.lock("r", ttl=1, timeout=30):
                pass

        async def crowd() -> None:
            async def one(resource: str) -> None:
                async with authority.lock(resource, ttl=1, timeout=30):
                    await asyncio.sleep(0.001)

            await asyncio.gather(*(one(f"m{number % 40}") for number in range(80)))

        with authority.lock("r", ttl=1) as first, authority.lock("a", "b", ttl=1):
            assert first == 1
        held = authority.lock("r", ttl=1)
        held.acquire()
        held.remint()
        held.extend(1)
        assert held.locked()
        waiting = pool.submit(wait)
        assert eventually(lambda: waiting_on(admin_url) == 1)
        held.release()
        waiting.result()
        held = authority.lock("r", ttl=0.5, renew=False)
        held.acquire()
        pool.submit(wait).result()  # until its lease ends
        with pytest.raises(LockLostError):
            held.release()
        asyncio.run(crowd())
        admin.hset(NODE_KEY, "r", "0" * 40)  # as after a restart with all data

        def votes_again() -> bool:
            with suppress(AuthorityError), authority.lock("r", ttl=0.5, timeout=1):
                return True
            return False

        assert eventually(votes_again)
        assert [status.state for status in authority.status()] == [NodeState.ADMITTED]


def test_rule_is_enough_and_has_no_word_too_many(acl: Acl, any_server: Node) -> None:
    """The server refuses nothing, not even in silence; of all commands that it allows, each is used."""
    acl.admin.config_resetstat()
    use_everything(acl.url, acl.admin, any_server.url)
    assert acl.refused() == []
    told: Any = acl.admin.info("commandstats")
    used = {name.removeprefix("cmdstat_").partition("|")[0] for name in told}
    allowed = {word[1:].partition("|")[0] for word in acl.rule if word.startswith("+")}
    assert allowed - used == set()


@ONE_SERIES
def test_rule_reaches_no_other_key(acl: Acl) -> None:
    acl.admin.set("{fencelock}x", "mine")
    with redis.Redis.from_url(acl.url) as client:
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


@ONE_SERIES
def test_operator_needs_scan_as_well(acl: Acl) -> None:
    acl.allow([*acl.rule, "+scan"])
    with Redlock(acl.url) as authority:
        authority.init(base=0, max_ttl=1)
        authority.acquire(("r",), ttl=1, timeout=0)
        acl.admin.hset(NODE_KEY, "r", "0" * 40)
        assert authority.remains()
        assert authority.clear() >= 3
    assert fencelock("init", acl.url).returncode == 0
    assert acl.refused() == []


@ONE_SERIES
def test_missing_right_is_named(acl: Acl) -> None:
    with Redlock(acl.url) as authority:
        authority.init()
        with pytest.raises(
            QuorumError, match=r"lacks the right \+scan .*; give the user that right"
        ) as refused:
            authority.inspect()
        assert "mend their URLs" not in str(refused.value)
        acl.allow([word for word in acl.rule if word != "+object|encoding"])
        with pytest.raises(QuorumError, match=r"lacks the right \+object\|encoding "):
            authority.lock("r", timeout=0).acquire()
