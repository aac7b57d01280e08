"""URLs and clients of moving nodes are understood, or refused, before any connection is made."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.exceptions import MovedError

from fencelock import Redlock
from fencelock.authority.redlock.transport.endpoints import endpoint_of, split_urls
from fencelock.cli.shared import without_password


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("redis+sentinel://s1/main", "redis+sentinel://s1:26379/main"),
        (
            "redis+sentinel://s2:1, s1:26379 ,s3/main",
            "redis+sentinel://s1:26379,s2:1,s3:26379/main",
        ),
        ("rediss+sentinel://u:pw@s1:1/main/2", "rediss+sentinel://s1:1/main/2"),
        ("redis+sentinel://s1:1/main?db=3", "redis+sentinel://s1:1/main/3"),
        (
            "redis+sentinel://[::1]:5,[fe80::2]/my%2Fservice",
            "redis+sentinel://[::1]:5,[fe80::2]:26379/my%2Fservice",
        ),
        (
            "redis+sentinel://s1/main?sentinel_password=pw&socket_keepalive=yes",
            "redis+sentinel://s1:26379/main",
        ),
        ("redis+cluster://c1", "redis+cluster://c1:6379"),
        ("rediss+cluster://u:pw@c2:7,c1/0", "rediss+cluster://c1:6379,c2:7"),
        ("redis+cluster://c1,[::1]:7?db=0", "redis+cluster://[::1]:7,c1:6379"),
        ("redis://[::1]:7/2", "redis://[::1]:7/2"),
    ],
)
def test_url_of_a_node_that_moves_is_understood(url: str, name: str) -> None:
    """However its hosts are ordered, the node has one name, in which nothing is secret."""
    assert Redlock(url).nodes == (name,)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("redis+sentinel://s1:26379", "names no service"),
        ("redis+sentinel://:secret@s1:26379/", "names no service"),
        ("redis+sentinel:///main", "names no host"),
        ("redis+sentinel://s1,,s2/main", "names no host"),
        ("redis+sentinel://s1:port/main", "no URL"),
        ("redis+sentinel://s1/main/database", "number of a database"),
        ("redis+sentinel://u:secret@s1/main?no_such_setting=1", "unknown setting"),
        ("redis+sentinel://s1/main?sentinel_secret=1", "unknown setting"),
        ("redis+cluster://", "names no host"),
        ("redis+cluster://:secret@c1:6379/1", "only one: leave the number out"),
        ("redis+cluster://c1?db=1", "only one: leave the number out"),
        ("redis+cluster://:secret@c1:6379,c2:x", "no URL"),
        ("sentinel://s1:26379/main", "redis\\+sentinel://"),
        ("redis+proxy://:secret@h", "redis\\+sentinel://"),
    ],
)
def test_url_of_a_node_that_moves_says_what_is_wrong_with_it(url: str, advice: str) -> None:
    """At once, and without its password."""
    with pytest.raises(ValueError, match=advice) as refusal:
        Redlock(url)
    assert "secret@" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("redis://a,redis://b", ["redis://a", "redis://b"]),
        (" redis://a , redis://b ,", ["redis://a", "redis://b"]),
        (
            "redis+sentinel://a:1,b:2/x,redis+sentinel://c,d/y,redis://e",
            ["redis+sentinel://a:1,b:2/x", "redis+sentinel://c,d/y", "redis://e"],
        ),
        ("redis+cluster://a,b", ["redis+cluster://a,b"]),
        ("redis://:a,b@h", ["redis://:a,b@h"]),
        (" , ", []),
    ],
)
def test_urls_in_one_text_may_have_several_hosts(text: str, urls: list[str]) -> None:
    """A comma ends a URL only where another one begins."""
    assert split_urls(text) == urls


def test_command_to_type_names_moving_nodes_without_their_passwords() -> None:
    authority = Redlock("redis+sentinel://:secret@s1/main,redis+cluster://me:secret@c1")
    command = authority._init_command()
    assert "redis+sentinel://:PASSWORD@s1:26379/main" in command
    assert "redis+cluster://me:PASSWORD@c1:6379" in command


def test_same_service_twice_is_one_node() -> None:
    """Whatever the order of its sentinels."""
    with pytest.raises(ValueError, match="named 2 times"):
        Redlock("redis+sentinel://a,b/main,redis+sentinel://b,a/main")


def test_client_of_a_service_is_named_as_its_url_is() -> None:
    """So that a blank node is known to all clients under one address."""
    world: Any = redis.sentinel
    manager = world.Sentinel([("s2", 26379), ("s1", 1)], sentinel_kwargs={"password": "secret"})
    for client, name in (
        (manager.master_for("main"), "redis+sentinel://s1:1,s2:26379/main"),
        (manager.master_for("main", ssl=True, db=2), "rediss+sentinel://s1:1,s2:26379/main/2"),
    ):
        assert Redlock(client).nodes == (name,)
    with pytest.raises(TypeError, match="only primaries"):
        Redlock(manager.slave_for("main"))


def test_client_of_a_service_that_connects_in_its_own_way_is_refused() -> None:
    """What it does cannot be repeated."""

    class Mine(redis.sentinel.SentinelManagedConnection):
        pass

    world: Any = redis.sentinel
    manager = world.Sentinel([("s1", 26379)])
    with pytest.raises(TypeError, match="cannot repeat how this client connects"):
        Redlock(manager.master_for("main", connection_class=Mine))


@pytest.mark.parametrize("host", ["", "?"])
def test_server_that_does_not_know_its_own_address_means_the_one_that_was_used(host: str) -> None:
    """So a cluster says it where it is told to give no addresses."""
    endpoint = endpoint_of("redis+cluster://:pw@me:1", 1.0)
    (server,) = endpoint.servers()
    there = endpoint.redirected(server, MovedError(f"12 {host}:7"))
    assert there is not None
    assert there.address == "me:7"
    assert there.settings["password"] == "pw"
    assert endpoint_of("redis://:pw@me:1", 1.0).redirected(server, MovedError(f"12 {host}:7")) is None


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("valkey://host:6379", "redis://host:6379"),
        ("valkeys://user:secret@host:6380/1", "rediss://host:6380/1"),
        ("valkey+sentinel://a:1,b:2/service", "redis+sentinel://a:1,b:2/service"),
        ("valkeys+cluster://a:1", "rediss+cluster://a:1"),
    ],
)
def test_valkey_is_another_word_for_redis(url: str, name: str) -> None:
    """One server has one name, however its URL is written."""
    assert Redlock(url).nodes == (name,)
    with pytest.raises(ValueError, match="named 2 times"):
        Redlock([url, url.replace("valkey", "redis")])


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}@h:1", "redis://:PASSWORD@h:1"),
        (f"rediss://u:{SECRET}@h:1/2?ssl_ca_certs=/x", "rediss://u:PASSWORD@h:1/2?ssl_ca_certs=/x"),
        (f"redis://h?password={SECRET}&db=1", "redis://h?password=PASSWORD&db=1"),
        (
            f"redis+sentinel://u:{SECRET}@a:1,b:2/s?sentinel_password={SECRET}",
            "redis+sentinel://u:PASSWORD@a:1,b:2/s?sentinel_password=PASSWORD",
        ),
        ("redis://user@h:1", "redis://user@h:1"),
        ("unix:///tmp/a.sock?db=1", "unix:///tmp/a.sock?db=1"),
    ],
)
def test_url_is_shown_without_its_password(url: str, shown: str) -> None:
    """All else stays, so that it can be typed again."""
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url",
    [f"redis://:{SECRET}?x@h:1", f"redis://:a#{SECRET}@h:1", f"http://:{SECRET}@h", f"redis://:{SECRET}@h:p"],
)
def test_error_about_a_url_does_not_show_its_password(url: str) -> None:
    """Also where the password should have been escaped."""
    with pytest.raises(ValueError, match="write redis://") as refused:
        Redlock(url)
    assert SECRET not in str(refused.value)
