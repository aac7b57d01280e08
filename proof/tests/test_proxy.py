"""The network between workers and a real node delays, drops and duplicates as its weather says."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from proof.servers import Nodes
from proof.torture.proxy import FAIR, Proxies, Weather
from tests.polling import eventually

pytestmark = pytest.mark.timed

COUNT = "return redis.call('INCR', 'count')"


@pytest.fixture(scope="module")
def node() -> Iterator[Nodes]:
    """One node, with a password: a client that sends a command again must say hello, too."""
    with Nodes(1, password="top secret") as made:  # not secret at all
        yield made


@pytest.fixture
def proxies(node: Nodes) -> Iterator[Proxies]:
    """A proxy before the node, in fair weather, with nothing counted yet."""
    with client(node.urls[0]) as direct:
        direct.flushall()
    with Proxies(node.urls, random.Random(1)) as made:
        yield made


def client(url: str, patience: float = 5.0) -> Any:
    """Return a client that neither retries nor reconnects."""
    return redis.Redis.from_url(url, socket_timeout=patience, retry=Retry(NoBackoff(), 0))


def count(node: Nodes) -> int:
    """Return how often the node has counted."""
    with client(node.urls[0]) as direct:
        return int(direct.get("count") or 0)


def test_duplicates_arrive_once_more_and_are_not_answered(node: Nodes, proxies: Proxies) -> None:
    """The worker gets the answers to what it has sent itself."""
    proxies.change(0, Weather(duplicates=1.0, lateness=0.1))
    with client(proxies.urls[0]) as far:
        answers = [far.eval(COUNT, 0) for _ in range(20)]
    assert answers == sorted(set(answers))
    assert eventually(lambda: count(node) == 40)


def test_a_lost_request_never_arrives(node: Nodes, proxies: Proxies) -> None:
    """Nor does anything after it on that connection, which ends when the weather changes."""
    with client(proxies.urls[0], patience=0.3) as far:
        far.eval(COUNT, 0)
        proxies.change(0, Weather(requests_pass=False))
        with pytest.raises(redis.TimeoutError):
            far.eval(COUNT, 0)
    proxies.change(0, FAIR)
    with client(proxies.urls[0]) as far:
        assert far.eval(COUNT, 0) == 2
    assert count(node) == 2


def test_a_lost_answer_is_of_a_request_that_arrived(node: Nodes, proxies: Proxies) -> None:
    """The sender cannot know that the request arrived."""
    with client(proxies.urls[0], patience=0.3) as far:
        far.ping()
        proxies.change(0, Weather(answers_pass=False))
        with pytest.raises(redis.TimeoutError):
            far.eval(COUNT, 0)
    assert eventually(lambda: count(node) == 1)


def test_a_connection_that_has_lost_something_ends_with_the_bad_weather(proxies: Proxies) -> None:
    """It would be a stream with a hole; connections that have lost nothing go on."""
    with client(proxies.urls[0]) as quiet, client(proxies.urls[0], patience=0.3) as hit:
        quiet.ping(), hit.ping()
        broken = hit.connection_pool.get_connection()
        proxies.change(0, Weather(answers_pass=False))
        broken.send_command("PING")
        assert not broken.can_read(timeout=0.5)
        proxies.change(0, FAIR)
        with pytest.raises(redis.ConnectionError):
            broken.read_response()
        assert quiet.ping()


def test_delays_take_time(proxies: Proxies) -> None:
    """And nothing else."""
    with client(proxies.urls[0]) as far:
        far.ping()
        proxies.change(0, Weather(delay=0.1))
        began = time.monotonic()
        for _ in range(10):
            far.ping()
        assert time.monotonic() - began > 0.2


def test_a_node_that_is_down_is_down_behind_its_proxy() -> None:
    """Connections end, new ones are not answered."""
    with Nodes(1) as nodes, Proxies(nodes.urls, random.Random(1)) as proxies, client(proxies.urls[0]) as far:
        far.ping()
        nodes[0].kill()
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                far.ping()
        nodes[0].restart(keep_data=False)
        with suppress(redis.ConnectionError):
            far.ping()
        assert far.ping()
