"""All nodes restart blank, one after the other, the next when all are admitted: a majority is always well.

No client that knows the right list may lose a lease by that, or hear that the list is wrong, whatever the
client does or leaves undone meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

from fencelock import Redlock
from fencelock.authority.redlock.admin import NodeState
from fencelock.errors import FencelockError, MembershipError
from fencelock.lease import Lease
from proof.servers import Node, Nodes
from tests.polling import IMPATIENT, eventually

pytestmark = [pytest.mark.timed, pytest.mark.long]

MAX_TTL = 1.2

Connect = Callable[..., Redlock]


@pytest.fixture
def three(nodes: Nodes) -> list[Node]:
    with Redlock([node.url for node in nodes[:3]]) as authority:
        authority.init(base=0, max_ttl=MAX_TTL)
    return list(nodes[:3])


@contextmanager
def client_of(nodes: list[Node], *, recover: bool = True) -> Iterator[Redlock]:
    with Redlock([node.url for node in nodes], **IMPATIENT, recover=recover) as authority:
        yield authority


def restart_all(nodes: list[Node]) -> None:
    """Restart the nodes blank, each as soon as all of them vote; others use them meanwhile.

    When this returns, a lease that had not been extended since the last restart would have ended.
    """
    with client_of(nodes) as others:

        def look() -> bool:
            with suppress(FencelockError), others.lock("other", ttl=0.5, timeout=1):
                pass
            return {status.state for status in others.status()} == {NodeState.ADMITTED}

        for node in nodes:
            node.restart(keep_data=False)
            assert eventually(look, 20.0)
    time.sleep(MAX_TTL)


class Waiter(threading.Thread):
    """Waits for a lock that is held."""

    def __init__(self, authority: Redlock) -> None:
        super().__init__()
        self.authority = authority
        self.outcome: Any = None
        self.start()

    def run(self) -> None:
        """Note the token, or the error."""
        try:
            with self.authority.lock("held", ttl=MAX_TTL, timeout=60) as token:
                self.outcome = token
        except FencelockError as error:
            self.outcome = error


@pytest.mark.parametrize("recover", [False, True])
def test_lease_that_is_only_renewed_outlives_a_restart_of_every_node(
    three: list[Node], *, recover: bool
) -> None:
    """Its holder calls nothing; another waits for it all the time, and has it in the end."""
    with client_of(three, recover=recover) as holder, client_of(three, recover=recover) as other:
        lost: list[Lease] = []
        lock = holder.lock("held", ttl=MAX_TTL)
        lock.on_lost(lost.append)
        token = lock.acquire().token
        waiter = Waiter(other)
        restart_all(three)
        assert (lost, waiter.outcome) == ([], None)
        lock.release()
        waiter.join(30)
        assert isinstance(waiter.outcome, int), waiter.outcome
        assert waiter.outcome > token


@pytest.mark.parametrize("recover", [False, True])
def test_lease_of_a_task_outlives_a_restart_of_every_node(three: list[Node], *, recover: bool) -> None:
    """As with blocking code: the loop renews it, and another task of another client waits."""

    async def main() -> None:
        with client_of(three, recover=recover) as holder, client_of(three, recover=recover) as other:
            async with holder.lock("held", ttl=MAX_TTL) as token:
                waiting = asyncio.create_task(other.aio.acquire(("held",), ttl=MAX_TTL, timeout=60))
                await asyncio.to_thread(restart_all, three)
                assert not waiting.done()
            grant = await waiting
            assert grant.tokens[0] > token
            await other.aio.release(grant)
            await holder.aio.close()
            await other.aio.close()

    asyncio.run(main())


@pytest.mark.parametrize("recover", [False, True])
def test_client_that_was_idle_while_every_node_restarted_acquires(
    three: list[Node], *, recover: bool
) -> None:
    """All its connections have broken, and it was there before."""
    with client_of(three, recover=recover) as client:
        with client.lock("r", ttl=MAX_TTL) as before:
            pass
        restart_all(three)
        with client.lock("r", ttl=MAX_TTL, timeout=5) as after:
            assert after > before
        assert {status.state for status in client.status()} == {NodeState.ADMITTED}


def test_client_that_sees_each_node_blank_still_knows_the_list(three: list[Node]) -> None:
    """It locks while each of them is blank, and so has new connections before the node is admitted."""
    with client_of(three, recover=False) as client, client_of(three) as others:
        for count, node in enumerate(three, 1):
            node.restart(keep_data=False)
            assert eventually(lambda: takes(client) and blank_to(client) == count)  # noqa: B023 - it is over then
            assert eventually(lambda: takes(others) and admitted(others), 20.0)
        with client.lock("r", ttl=MAX_TTL, timeout=5) as token:
            assert token


def takes(client: Redlock) -> bool:
    """Lock once. Other clients may be in the way, but no error may say that the list is wrong."""
    try:
        with client.lock("r", ttl=0.5, timeout=5):
            return True
    except MembershipError:
        raise
    except FencelockError:
        return False


def blank_to(client: Redlock) -> int:
    """Return how many nodes were blank when the client connected to them."""
    return sum(identity.membership is None for identity in client._view.identities.values())


def admitted(client: Redlock) -> bool:
    """Whether all nodes vote."""
    return {status.state for status in client.status()} == {NodeState.ADMITTED}


def test_client_whose_nodes_belong_to_another_fleet_by_now_is_told(nodes: Nodes, three: list[Node]) -> None:
    """What it remembers of the former list does not stand against what the nodes say now."""
    with client_of(three) as client:
        assert takes(client)
        for node in three:
            with redis.Redis.from_url(node.url) as admin:
                admin.flushall()
        with Redlock(nodes.urls[:5]) as operator:
            operator.init(base=0)
        with pytest.raises(MembershipError, match="initialised as 5"):
            client.lock("r", ttl=0.5, timeout=5).acquire()
