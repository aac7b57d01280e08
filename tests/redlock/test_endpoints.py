"""Nodes and settings are understood, or refused in words without a password, before a connection is made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.sentinel
from redis.exceptions import MovedError

import fencelock
from fencelock import Redlock
from fencelock.authority.redlock.transport.endpoints import endpoint_of, split_urls
from fencelock.cli.shared import without_password
from fencelock.tokens import MAX_COUNTER

SECRET = "s3cr3t"
_SENTINEL: Any = redis.sentinel  # redis-py has no types for it


class _Mine(_SENTINEL.SentinelManagedConnection):  # type: ignore[misc]
    """Connects in a way that cannot be repeated."""


def service(**settings: Any) -> Any:
    return _SENTINEL.Sentinel([("s2", 26379), ("s1", 1)], sentinel_kwargs={"password": SECRET}).master_for(
        "main", **settings
    )


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("redis+sentinel://s1/main", "redis+sentinel://s1:26379/main"),
        ("redis+sentinel://s2:1, s1:26379 ,s3/main", "redis+sentinel://s1:26379,s2:1,s3:26379/main"),
        (f"rediss+sentinel://u:{SECRET}@s1:1/main/2", "rediss+sentinel://s1:1/main/2"),
        ("redis+sentinel://s1:1/main?db=3", "redis+sentinel://s1:1/main/3"),
        (
            "redis+sentinel://[::1]:5,[fe80::2]/my%2Fservice",
            "redis+sentinel://[::1]:5,[fe80::2]:26379/my%2Fservice",
        ),
        (
            f"redis+sentinel://s1/main?sentinel_password={SECRET}&socket_keepalive=yes",
            "redis+sentinel://s1:26379/main",
        ),
        ("redis+cluster://c1", "redis+cluster://c1:6379"),
        (f"rediss+cluster://u:{SECRET}@c2:7,c1/0", "rediss+cluster://c1:6379,c2:7"),
        ("redis+cluster://c1,[::1]:7?db=0", "redis+cluster://[::1]:7,c1:6379"),
        ("redis://[::1]:7/2", "redis://[::1]:7/2"),
        ("valkey://host:6379", "redis://host:6379"),
        (f"valkeys://user:{SECRET}@host:6380/1", "rediss://host:6380/1"),
        ("valkey+sentinel://a:1,b:2/service", "redis+sentinel://a:1,b:2/service"),
        ("valkeys+cluster://a:1", "rediss+cluster://a:1"),
        (service(), "redis+sentinel://s1:1,s2:26379/main"),
        (service(ssl=True, db=2), "rediss+sentinel://s1:1,s2:26379/main/2"),
    ],
)
def test_node_has_one_name(node: Any, name: str) -> None:
    authority = Redlock(node)
    assert authority.nodes == (name,)
    assert SECRET not in repr(authority)


#: Texts that cannot be a list of nodes, and a word of the error.
WRONG_URLS = {
    "": "redis://",
    " , ": "redis://",
    "127.0.0.1:6379": "redis://",
    "http://127.0.0.1:6379": "redis://",
    "redis://": "redis://",
    "redis://:6379": "redis://",
    "redis://h:port": "redis://",
    "redis://h?no_such_setting=1": "setting",
    "redis://h:6379,nonsense": "redis://",
    "redis://h:1,redis://h:2,redis://h:1": "named 2 times",
    "redis+sentinel://a,b/main,redis+sentinel://b,a/main": "named 2 times",
    "valkey://h,redis://h": "named 2 times",
    "redis+sentinel://s1:26379": "names no service",
    f"redis+sentinel://:{SECRET}@s1:26379/": "names no service",
    "redis+sentinel:///main": "names no host",
    "redis+sentinel://s1,,s2/main": "names no host",
    "redis+sentinel://s1:port/main": "no URL",
    "redis+sentinel://s1/main/database": "number of a database",
    f"redis+sentinel://u:{SECRET}@s1/main?no_such_setting=1": "unknown setting",
    "redis+sentinel://s1/main?sentinel_secret=1": "unknown setting",
    "redis+cluster://": "names no host",
    f"redis+cluster://:{SECRET}@c1:6379/1": "only one: leave the number out",
    "redis+cluster://c1?db=1": "only one: leave the number out",
    f"redis+cluster://:{SECRET}@c1:6379,c2:x": "no URL",
    "sentinel://s1:26379/main": r"redis\+sentinel://",
    f"redis+proxy://:{SECRET}@h": r"redis\+sentinel://",
}
#: The same, of the wrong type.
WRONG_TYPES: list[tuple[Any, str]] = [
    *((nonsense, ".") for nonsense in (5, None, [5], [None], {"a": 1}.values(), redis.asyncio.Redis)),
    (redis.asyncio.Redis(host="h"), r"redis\.Redis or redis\.RedisCluster, in asyncio code too"),
    ([redis.asyncio.RedisCluster(host="h")], "in asyncio code too"),
    (_SENTINEL.Sentinel([("s1", 1)]).slave_for("main"), "only primaries"),
    (service(connection_class=_Mine), "cannot repeat how this client connects"),
]
#: Settings that are out of range.
WRONG_SETTINGS: list[dict[str, Any]] = [
    *({"namespace": text} for text in ("", "a b", "{x}", 5)),
    *({"node_timeout": seconds} for seconds in (0, -1)),
    *({"outage_grace": seconds} for seconds in (math.inf, -0.1)),
    {"connect_timeout": math.nan},
    {"verify": "always"},
]


def test_url_that_cannot_be_understood_is_refused() -> None:
    for url, word in WRONG_URLS.items():
        with pytest.raises(ValueError, match=word) as refusal:
            Redlock(url)
        assert SECRET not in str(refusal.value)


def test_node_of_the_wrong_kind_is_refused() -> None:
    for nodes, word in WRONG_TYPES:
        with pytest.raises(TypeError, match=word):
            Redlock(nodes)


def test_setting_out_of_range_is_refused() -> None:
    for settings in WRONG_SETTINGS:
        with pytest.raises(ValueError, match=next(iter(settings))):
            Redlock("redis://h", **settings)


def test_init_out_of_range_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"base": -1}, {"base": MAX_COUNTER}, {"max_ttl": 0}, {"max_ttl": math.nan}]
    for settings in wrong:
        with Redlock("redis://127.0.0.1:1") as authority, pytest.raises(ValueError, match=r"counters|ttl"):
            authority.init(**settings)


def test_configure_refuses_what_is_no_authority() -> None:
    nonsense: Any
    for nonsense in (None, 5, object()):
        with pytest.raises(TypeError, match="redis-py clients"):
            fencelock.configure(nonsense)
    with Redlock("redis://h") as authority, pytest.raises(TypeError, match="settings"):
        fencelock.configure(authority, namespace="x")  # type: ignore[call-overload]


def test_comma_ends_a_url_only_where_another_one_begins() -> None:
    rows: list[tuple[str, list[str]]] = [
        ("redis://a,redis://b", ["redis://a", "redis://b"]),
        (" redis://a , redis://b ,", ["redis://a", "redis://b"]),
        (
            "redis+sentinel://a:1,b:2/x,redis+sentinel://c,d/y,redis://e",
            ["redis+sentinel://a:1,b:2/x", "redis+sentinel://c,d/y", "redis://e"],
        ),
        ("redis+cluster://a,b", ["redis+cluster://a,b"]),
        ("redis://:a,b@h", ["redis://:a,b@h"]),
        (" , ", []),
    ]
    for text, urls in rows:
        assert split_urls(text) == urls


def test_command_to_type_names_moving_nodes_without_their_passwords() -> None:
    authority = Redlock(f"redis+sentinel://:{SECRET}@s1/main,redis+cluster://me:{SECRET}@c1")
    command = authority._init_command()
    assert "redis+sentinel://:PASSWORD@s1:26379/main" in command
    assert "redis+cluster://me:PASSWORD@c1:6379" in command


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


def test_url_is_shown_without_its_password() -> None:
    rows = [
        (f"redis://:{SECRET}@h:1", "redis://:PASSWORD@h:1"),
        (f"rediss://u:{SECRET}@h:1/2?ssl_ca_certs=/x", "rediss://u:PASSWORD@h:1/2?ssl_ca_certs=/x"),
        (f"redis://h?password={SECRET}&db=1", "redis://h?password=PASSWORD&db=1"),
        (
            f"redis+sentinel://u:{SECRET}@a:1,b:2/s?sentinel_password={SECRET}",
            "redis+sentinel://u:PASSWORD@a:1,b:2/s?sentinel_password=PASSWORD",
        ),
        ("redis://user@h:1", "redis://user@h:1"),
        ("unix:///tmp/a.sock?db=1", "unix:///tmp/a.sock?db=1"),
    ]
    for url, shown in rows:
        assert without_password(url) == shown


def test_no_error_about_a_url_that_was_typed_wrong_shows_its_password() -> None:
    """Also where the password should have been escaped, or stands where the port does."""
    for url in (
        *(
            f"redis://:{SECRET}?x@h:1",
            f"redis://:a#{SECRET}@h:1",
            f"http://:{SECRET}@h",
            f"redis://:{SECRET}@h:p",
        ),
        *(f"redis://me:{SECRET}@h:x", f"redis://h:x?password={SECRET}", f"rediss://:{SECRET}@"),
        *(
            f"redis:/bob:{SECRET}@h:1",
            f"redis//bob:{SECRET}@h",
            f"bob:{SECRET}@h:1",
            f"redis://user:{SECRET}",
        ),
        *(f"redis://user:{SECRET}/0", f"redis://user:{SECRET}@h:port", f"redis+sentinel://u:{SECRET},b:1/x"),
        *(f"redis+cluster://user:{SECRET}", f"foo://user:{SECRET}@h", f"redis://h?password={SECRET}&x=1"),
    ):
        with pytest.raises(ValueError, match=r"URL|redis://|setting") as refused:
            Redlock(url)
        assert SECRET not in str(refused.value)
    wrong: Any
    for wrong in ({"url": f"redis://:{SECRET}@h"}, {f"redis://:{SECRET}@h"}, [{f"redis://:{SECRET}@h"}]):
        with pytest.raises(TypeError) as named:  # by its type, for it may hold anything
            fencelock.configure(wrong)
        assert SECRET not in str(named.value)


def test_what_has_a_password_inside_does_not_show_it() -> None:
    endpoint = endpoint_of(f"redis://user:{SECRET}@h", 1)
    assert SECRET not in repr(endpoint)
    assert SECRET not in repr(endpoint.named)
    assert repr(Redlock.__new__(Redlock))  # its constructor has failed
