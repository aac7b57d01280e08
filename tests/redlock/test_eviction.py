"""A node that drops keys when its memory is full is refused, because it may drop locks and counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock import admin
from fencelock.authority.redlock.transport.connector import eviction_of
from fencelock.errors import AuthorityError
from proof.servers import Nodes
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY, OF_THE_NODE, keys_of
from tests.test_cli import fencelock


@pytest.fixture
def node(make_nodes: Callable[..., Nodes]) -> Nodes:
    return make_nodes(1, settings={"maxmemory": "50mb", "maxmemory-policy": "allkeys-lru"})


@pytest.fixture(autouse=True)
def first_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_warned_of_eviction", set())


def configure(nodes: Nodes, **settings: str) -> None:
    with redis.Redis.from_url(nodes.url) as client:
        for name, value in settings.items():
            client.config_set(name.replace("_", "-"), value)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_init_refuses_a_node_that_evicts(node: Nodes, policy: str) -> None:
    """With the line to type; once it is typed, the node is fit. Nothing was written before."""
    configure(node, maxmemory_policy=policy)
    with Redlock(node.urls) as authority:
        with pytest.raises(AuthorityError, match="CONFIG SET maxmemory-policy noeviction") as refused:
            authority.init()
        assert (node.url in str(refused.value), policy in str(refused.value)) == (True, True)
        assert "provider's parameter group" in str(refused.value)  # where there is no CONFIG
        with redis.Redis.from_url(node.url) as client:
            assert client.dbsize() == 0
    configure(node, maxmemory_policy="noeviction")
    with Redlock(node.urls) as authority:
        assert authority.init()


def test_init_does_not_mind_a_policy_that_never_applies(node: Nodes) -> None:
    configure(node, maxmemory="0")
    with Redlock(node.urls) as authority:
        assert authority.init()


def test_init_of_asyncio_refuses_as_well(node: Nodes) -> None:
    async def main() -> None:
        with Redlock(node.urls) as authority:
            with pytest.raises(AuthorityError, match="noeviction"):
                await authority.aio.init()
            assert await authority.aio.init(allow_eviction=True)

    asyncio.run(main())


def test_command_refuses_unless_it_is_told_to_go_on(node: Nodes) -> None:
    """`--allow-eviction` initialises; a later init without it changes nothing; `nodes` shows it."""
    refused = fencelock("init", *node.urls)
    assert (refused.returncode, "--allow-eviction" in refused.stderr) == (1, True)
    assert fencelock("init", *node.urls, "--allow-eviction").returncode == 0
    again = fencelock("init", *node.urls)
    assert (again.returncode, "nothing was changed" in again.stderr) == (0, True)
    shown = fencelock("nodes", "--current", node.url)
    assert (shown.returncode, "evicts keys (allkeys-lru)" in shown.stdout) == (0, True)


def test_clients_warn_once_in_a_process(node: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    for allow in (True, False):
        with Redlock(node.urls) as authority:
            authority.init(allow_eviction=allow)
            with authority.lock("r", ttl=1):
                pass
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert node.url in warnings[0].getMessage()


def test_what_info_tells_of_eviction() -> None:
    """A service may hide either line."""
    rows: list[tuple[dict[str, str], str | None]] = [
        ({"maxmemory": "0", "maxmemory_policy": "allkeys-lru"}, ""),
        ({"maxmemory": "9", "maxmemory_policy": "noeviction"}, ""),
        ({"maxmemory": "9", "maxmemory_policy": "volatile-ttl"}, "volatile-ttl"),
        ({"maxmemory_policy": "noeviction"}, ""),
        ({"maxmemory": "9"}, None),
        ({"maxmemory_policy": "allkeys-lru"}, None),
        ({}, None),
    ]
    for info, eviction in rows:
        assert eviction_of(info) == eviction


def test_init_says_where_it_cannot_tell(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fencelock.authority.redlock.transport.connector.eviction_of", lambda _: None)
    with Redlock(nodes.urls[0]) as authority:
        assert authority.init()
    assert f"{nodes.urls[0]}: its INFO does not tell" in caplog.text


@pytest.mark.complaint("redisson#6510", "25 million token keys fill the memory, none with a ttl")
def test_tokens_need_no_key_for_each_resource(authority: Redlock, nodes: Nodes) -> None:
    for number in range(2000):
        with authority.lock(f"r{number}"):
            pass
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            assert eventually(lambda client=client: keys_of(client) == OF_THE_NODE, 10)  # type: ignore[misc]
            assert client.hlen(NODE_KEY) <= 1024 + 20
