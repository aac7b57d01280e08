"""Silent nodes delay a call for a limited time, as a silent database does in `test_silence`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import pytest
from sqlalchemy import make_url

from fencelock import AuthorityError, Redlock
from proof.servers import Nodes
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

_WORLDS: Final = ("blocking", "asyncio")


class Silence:
    """Proxies before three nodes, two of which go silent."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._proxies = [Proxy(make_url(url)) for url in urls]
        self.urls = [each.url.render_as_string(hide_password=False) for each in self._proxies]

    def silence_open(self) -> None:
        """Let connections to a majority be silent for ever. New ones work."""
        for each in self._proxies[:2]:
            each.silence_open()

    def silence(self) -> None:
        """Let a majority be silent until `speak`."""
        for each in self._proxies[:2]:
            each.silence()

    def speak(self) -> None:
        """Pass on what was held back, and whatever comes."""
        for each in self._proxies:
            each.speak()

    def close(self) -> None:
        for each in self._proxies:
            each.close()


@pytest.fixture
def beside(nodes: Nodes) -> Iterator[Face]:
    """A client past the proxies."""
    with Redlock(nodes.urls[:3]) as authority:
        authority.init(base=0)
        yield BlockingFace(authority)


@pytest.fixture
def silence(nodes: Nodes, beside: Face) -> Iterator[Silence]:  # noqa: ARG001 - after its `init`
    """Two of three nodes, which can go silent."""
    made = Silence(nodes.urls[:3])
    yield made
    made.close()


@pytest.fixture(params=_WORLDS)
def face(request: pytest.FixtureRequest, silence: Silence) -> Iterator[Face]:
    """A client through the proxies, with open connections."""
    with Redlock(silence.urls) as authority:
        loop = Loop() if request.param == "asyncio" else None
        made: Face = BlockingFace(authority) if loop is None else AsyncFace(authority, loop)
        made.release(made.acquire("warm"))
        yield made
        silence.speak()
        if loop is not None:
            loop.run(authority.aio.close())
            loop.close()


def test_connections_that_went_silent_are_replaced(face: Face, silence: Silence) -> None:
    """A firewall has forgotten the connections, and the nodes live.

    The caller hears so, and a later try connects again.
    """

    def is_granted() -> bool:
        began = time.monotonic()
        try:
            face.release(face.acquire("r", timeout=2.0))
        except AuthorityError:
            assert time.monotonic() - began < 2.7
            return False
        return True

    silence.silence_open()
    assert eventually(is_granted)


def test_timeout_holds_beside_a_silent_majority(face: Face, silence: Silence, beside: Face) -> None:
    """Nothing is left of the acquisition once the nodes speak again, though its words arrive then."""

    def acquire() -> None:
        with pytest.raises(AuthorityError):
            face.acquire("r", timeout=2.0)

    silence.silence()
    assert took(acquire) < 2.7
    silence.speak()
    assert eventually(lambda: not is_held(beside, "r"))


def test_release_that_meets_a_silence_comes_when_it_ends(face: Face, silence: Silence, beside: Face) -> None:
    """Long before the end of the lease; the caller does not wait for it."""
    grant = face.acquire("r", ttl=60.0)
    silence.silence()

    def release() -> None:
        with contextlib.suppress(AuthorityError):
            assert face.release(grant) is None

    assert took(release) < 2.7
    silence.speak()
    assert eventually(lambda: not is_held(beside, "r"))


def test_lost_lease_is_told_by_the_clock(face: Face, silence: Silence, run_lock: RunLock) -> None:
    """The renewal has no answer. The callback hears of the end in time, and the block is left in time."""
    check_lost_lease(face, silence.silence, run_lock)


def test_process_ends_beside_a_silent_majority(silence: Silence) -> None:
    """Though it holds a lock, and has threads that renew it."""
    check_end_of_process(silence.silence, ",".join(silence.urls))
