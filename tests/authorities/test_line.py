"""The mark that etcd and ZooKeeper keep of a name is pruned, and not taken from another client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from kazoo.client import KazooClient

from fencelock import AuthorityError, CountersExhaustedError, Etcd, ZooKeeper
from fencelock.authority.line.entries import quoted
from fencelock.tokens import FORGED, MAX_TOKEN
from tests.authorities.faces import Face, take
from tests.conftest import with_new_path

#: A ttl that fits into the session of ZooKeeper.
TTL = 4.0


class Store(NamedTuple):
    """Two clients of one store, and a means to write the mark of a name that was locked before."""

    mine: Face
    other: Face
    write: Callable[[str, str], object]


@pytest.fixture(params=["etcd", "zookeeper"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with ExitStack() as stack:
        authority: Any
        other: Any
        if request.param == "etcd":
            cluster = request.getfixturevalue("etcd_cluster")
            cluster.heal()
            url = with_new_path(cluster.url)
            authority, other = stack.enter_context(Etcd(url)), stack.enter_context(Etcd(url))
            root = authority._members.hosts.root

            def write(name: str, value: str) -> None:
                cluster.ctl("put", f"/{root}/m/{quoted(name)}", "--", value)

        else:
            server = request.getfixturevalue("zookeeper_server")
            server.heal()
            url = f"{with_new_path(server.url)}?session_timeout={TTL:.0f}"
            authority, other = stack.enter_context(ZooKeeper(url)), stack.enter_context(ZooKeeper(url))
            kazoo = KazooClient(server.hosts)
            kazoo.start()
            stack.callback(kazoo.close)
            stack.callback(kazoo.stop)

            def write(name: str, value: str) -> None:
                kazoo.set(f"/{authority._hosts.root}/l/{quoted(name)}", value.encode())

        yield Store(Face(authority), Face(other), write)


def test_a_mark_of_somebody_else_is_named(store: Store) -> None:
    """A number that no client minted grants nothing, and the refused client leaves no entry in the line."""
    take(store.mine, ttl=TTL)
    for value in ("garbage", "-1", "9" * 30, "\xff", "5 x"):  # a new line of ZooKeeper has an empty mark
        store.write("r", value)
        with pytest.raises(AuthorityError, match="no mark of fencelock") as caught:
            store.other.acquire("r", ttl=TTL)  # which knows no earlier mark
        assert "/r" in str(caught.value)
    store.write("r", f"{1 << 20:020d}")
    assert store.mine.client.inspect() == []
    assert take(store.mine, ttl=TTL) > 0


def test_the_last_token_does_not_wrap_around(store: Store) -> None:
    take(store.mine, ttl=TTL)
    store.write("r", f"{MAX_TOKEN:020d}")
    with pytest.raises(CountersExhaustedError):
        store.mine.acquire("r", ttl=TTL)


def test_prune_spares_what_is_held_and_what_is_young(store: Store) -> None:
    """The next token exceeds all of that age, also by a client that knew the name."""
    old = int((time.time() - 7200) * 1000) << 10
    for name in ("free", "held", "young"):
        take(store.mine, name, ttl=TTL)
    held = store.other.acquire("held", ttl=TTL, timeout=2)
    for name in ("free", "held"):
        store.write(name, f"{old:020d}")
    assert store.mine.client.prune(3600) == 1
    assert take(store.mine, "free", ttl=TTL) > old
    assert store.other.release(held) is True
    with pytest.raises(ValueError, match="at least an hour"):
        store.mine.client.prune(60)
    with pytest.raises(ValueError, match="at least an hour"):
        asyncio.run(store.mine.client.aio.prune(60))
    recent = take(store.mine, "young", ttl=TTL)
    store.mine.client.init(above=recent + (1 << 45))  # which makes all earlier tokens look old
    assert store.mine.client.prune(3600) == 0


def test_tokens_begin_above_another_authority(store: Store) -> None:
    """Those of nodes and of a database are about as large; those of a far future are passed, too."""
    first = take(store.mine, ttl=TTL)
    store.mine.client.init(above=first + 5)
    near = take(store.mine, ttl=TTL)
    assert near > first + 5
    far = near + (1 << 45)
    take(store.other, "warm", ttl=TTL)
    store.mine.client.init(above=far)
    assert take(store.mine, ttl=TTL) > far
    assert take(store.other, "s", ttl=TTL) > far  # a client that was at work meanwhile
    with pytest.raises(ValueError, match="token"):
        store.mine.client.init(above=MAX_TOKEN + 1)
    with pytest.raises(ValueError, match="no use explains"):
        store.mine.client.init(above=FORGED)


REFUSED: list[tuple[Callable[[str], object], str, str]] = [
    (Etcd, "etcd://", "not a host"),
    (Etcd, "etcd://h:0", "not a host"),
    (Etcd, "etcd://h:99999", "not a host"),
    (Etcd, "etcd://root:hidden", r"^'root:\*\*\*' is not a host"),
    (Etcd, "etcd://a:1,b:2,a:1", "named twice"),
    (Etcd, "etcd://h:2379/a//b", "no valid root"),
    (Etcd, "etcd://h:2379/../x", "no valid root"),
    (Etcd, "etcd://h:2379?ca=x.pem", "certificates are for etcds"),
    (Etcd, "etcds://h:2379?ca=missing.pem", "cannot be read"),
    (Etcd, "etcds://h:2379?key=x", "needs its certificate"),
    (Etcd, "etcds://h:2379?verify=no", "no setting"),
    (Etcd, "http://h:2379", "none of etcd"),
    (Etcd, "etcd://user:hid/den@h", "^in the names and passwords of a URL"),
    (Etcd, "etcd://user:hid?den@h", "^in the names and passwords of a URL"),
    (Etcd, "etcd://user:hid@den@h", "^in the names and passwords of a URL"),
    (Etcd, "etcd:h", "none of etcd"),
    (ZooKeeper, "zookeeper://", "not a host"),
    (ZooKeeper, "zookeeper://h:2181?session_timeout=long", "no number"),
    (ZooKeeper, "zookeeper://h:2181?session_timeout=-1", "positive"),
    (ZooKeeper, "zookeeper://h:2181?timeout=3", "no setting"),
    (ZooKeeper, "zk://h:2181", "none of zookeeper"),
]


def test_a_url_that_cannot_be_understood_is_refused() -> None:
    """Before anything is connected to."""
    for make, url, says in REFUSED:
        with pytest.raises(ValueError, match=says):
            make(url)
