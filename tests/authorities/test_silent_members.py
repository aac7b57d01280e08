"""A silent member of etcd, or server of ZooKeeper, delays a call for a limited time, as in `test_silence`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from sqlalchemy import make_url

from fencelock import AuthorityError, QuorumError
from fencelock._locking import factory_of
from fencelock.authority.hosts import parse, shown
from tests.authorities.faces import AsyncFace, BlockingFace, Face, Loop, is_held
from tests.authorities.test_silence import (
    RunLock,
    check_end_of_process,
    check_lost_lease,
    run_lock,
    took,
)
from tests.polling import eventually
from tests.silence import Proxy

__all__ = ["run_lock"]

pytestmark = [pytest.mark.timed, pytest.mark.long]

_CASES: Final = [(sort, world) for sort in ("etcd", "zookeeper") for world in ("blocking", "asyncio")]


class Silence:
    """Proxies before all servers that a URL names, which go silent together."""

    def __init__(self, url: str, query: str) -> None:
        scheme = url.partition(":")[0]
        hosts = parse(url, (scheme,), 1, ())
        self._proxies = [Proxy(make_url(f"x://{shown(each)}")) for each in hosts.addresses]
        addresses = (f"{each.url.host}:{each.url.port}" for each in self._proxies)
        self.url = f"{scheme}://{','.join(addresses)}/{hosts.root}{query}"

    def silence_open(self) -> None:
        """Let the connections that are open be silent for ever. New ones work."""
        for each in self._proxies:
            each.silence_open()

    def silence(self) -> None:
        """Let all be silent until `speak`."""
        for each in self._proxies:
            each.silence()

    def speak(self) -> None:
        """Pass on what was held back, and whatever comes."""
        for each in self._proxies:
            each.speak()

    def close(self) -> None:
        for each in self._proxies:
            each.close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The servers themselves."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def silence(url: str) -> Iterator[Silence]:
    """All of them, behind proxies."""
    made = Silence(url, "?session_timeout=4" if url.startswith("zookeeper") else "")
    yield made
    made.close()


@pytest.fixture
def beside(url: str) -> Iterator[Face]:
    """A client past the proxies."""
    made: Any = factory_of(url)(url)
    with made as authority:
        yield BlockingFace(authority)


@pytest.fixture
def face(request: pytest.FixtureRequest, silence: Silence) -> Iterator[Face]:
    """A client through the proxies, with an open connection."""
    authority: Any = factory_of(silence.url)(silence.url)
    with authority:
        loop = Loop() if request.param == "asyncio" else None
        made: Face = BlockingFace(authority) if loop is None else AsyncFace(authority, loop)
        made.release(made.acquire("warm", ttl=2.0))
        yield made
        silence.speak()
        if loop is not None:
            loop.run(authority.aio.close())
            loop.close()


def each(function: Any) -> Any:
    """Take a test with both, in both worlds."""
    return pytest.mark.parametrize(("url", "face"), _CASES, indirect=True)(function)


@each
def test_connection_that_went_silent_is_replaced(face: Face, silence: Silence) -> None:
    """A firewall has forgotten it; the servers live. kazoo notices after two thirds of its session."""

    def is_granted() -> bool:
        try:
            face.release(face.acquire("r", ttl=2.0, timeout=2.0))
        except AuthorityError:
            return False
        return True

    silence.silence_open()
    assert eventually(is_granted, 10.0)


@each
def test_timeout_holds_beside_silent_servers(face: Face, silence: Silence, beside: Face) -> None:
    """Nothing is left of the acquisition once they speak again, though its words arrive then."""

    def acquire() -> None:
        with pytest.raises(QuorumError, match="did not answer"):
            face.acquire("r", ttl=4.0, timeout=2.0)

    silence.silence()
    assert 0.9 < took(acquire) < 2.7
    silence.speak()
    assert eventually(lambda: not is_held(beside, "r"), 10.0)


@each
def test_release_that_meets_a_silence_comes_when_it_ends(face: Face, silence: Silence, beside: Face) -> None:
    """Long before the end of the lease; the caller does not wait for it."""

    def release() -> None:
        with pytest.raises(QuorumError, match="released when the servers answer"):
            face.release(grant)

    grant = face.acquire("r", ttl=60.0 if silence.url.startswith("etcd") else 4.0)
    silence.silence()
    assert took(release) < 2.7
    silence.speak()
    assert eventually(lambda: not is_held(beside, "r"), 10.0)


@each
def test_lost_lease_is_told_by_the_clock(face: Face, silence: Silence, run_lock: RunLock) -> None:
    """The renewal has no answer. The callback hears of the end in time, and the block is left in time."""
    check_lost_lease(face, silence.silence, run_lock)


@pytest.mark.parametrize("url", ["etcd", "zookeeper"], indirect=True)
def test_process_ends_beside_silent_servers(silence: Silence) -> None:
    """Though it holds a lock, and has threads that renew it."""
    url = silence.url.replace("session_timeout=4", "session_timeout=30")
    check_end_of_process(silence.silence, url)


@each
def test_waiting_goes_on_behind_a_silence(face: Face, silence: Silence, beside: Face) -> None:
    """The waiter looks again, and gets the lock that was released during the silence."""
    grant = beside.acquire("r", ttl=20.0)
    began = time.monotonic()

    def acquire() -> None:
        got = face.acquire("r", ttl=4.0, timeout=30.0)
        assert face.release(got) is not False

    silence.silence_open()
    assert beside.release(grant) is True
    acquire()
    assert time.monotonic() - began < 15.0


@pytest.mark.parametrize("url", ["zookeeper"], indirect=True)
@pytest.mark.parametrize("later", [0.0, 0.6])
def test_what_is_closed_in_a_silence_connects_no_more(url: str, later: float) -> None:
    """A release was being asked for, and could begin another session, which nothing would end."""
    before = sessions()
    silence = Silence(url, "?session_timeout=4")
    authority = factory_of(silence.url)(silence.url)
    authority.release(authority.acquire(("r",), ttl=2.0, timeout=1.0))
    silence.silence()
    with pytest.raises(QuorumError):
        authority.acquire(("r",), ttl=2.0, timeout=0.5)
    time.sleep(later)
    authority.close()
    silence.speak()
    assert eventually(lambda: sessions() <= before, 15.0)
    silence.close()


def sessions() -> set[threading.Thread]:
    """Return the threads that serve sessions of ZooKeeper in this process."""
    return {each for each in threading.enumerate() if each.name == "fencelock-zookeeper"}
