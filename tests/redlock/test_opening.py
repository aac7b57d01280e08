"""What asyncio does without a generator: ask what every bid begins with, and take what is clear at once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencelock.authority.redlock import protocol
from fencelock.authority.redlock.protocol import (
    Answer,
    Bid,
    Broadcast,
    Fleet,
    Granted,
    Opened,
    Request,
    Round,
    Said,
    Sleep,
)
from fencelock.authority.redlock.seats import Ballot
from fencelock.errors import FencelockError
from tests.redlock.stage import fleet_of


def bid_for(fleet: Fleet) -> Bid:
    """Return a bid, the same each time."""
    return Bid.of(fleet, ("r",), "nonce", 30.0)


answers = st.sampled_from(
    [
        *(Answer(Said.GRANTED, epoch, (counter,)) for epoch in (0, 1) for counter in (1, 2)),
        Answer(Said.HELD, ttl=3.0),
        Answer(Said.HELD, ttl=0.1),
        Answer(Said.AMNESIA),
        Answer(Said.RESTARTED),
        Answer(Said.CONFIG),
        Answer(Said.SILENT),
        Answer(Said.UNREACHABLE, detail="refused"),
    ]
)


@given(told=st.lists(answers, min_size=1, max_size=7), took=st.sampled_from([0.0, 1.0, 29.9, 31.0]))
def test_bid_that_was_opened_goes_on_as_any_other(told: list[Answer], took: float) -> None:
    """Whatever the nodes said, and however late: the same grant, the same error, or the same next request."""
    fleet = fleet_of("list", len(told))
    heard = Round(100.0, 100.0 + took, dict(enumerate(told)))

    whole = _acquiring(fleet)
    first = next(whole)
    assert isinstance(first, Broadcast)
    assert _plain(first) == _plain(protocol.opening(fleet, bid_for(fleet)))
    expected = _next_of(whole, heard)

    opened = Opened(fleet, bid_for(fleet), heard)
    granted = protocol.at_once(opened)
    assert (_plain(granted) if granted else _next_of(_acquiring(fleet, opened))) == expected


@given(
    others=st.lists(answers, max_size=3),
    first=st.integers(0, 3),
    took=st.sampled_from([0.0, 1.0, 29.9, 31.0]),
)
def test_majority_that_says_the_same_decides(others: list[Answer], first: int, took: float) -> None:
    """Whatever the others had said by then: the grant is the one that all answers together come to."""
    alike = Answer(Said.GRANTED, 0, (1,))
    told = [*others[:first], *[alike] * (len(others) + 1), *others[first:]]
    fleet = fleet_of("list", len(told))
    heard = Round(100.0, 100.0 + took, dict(enumerate(told)))
    expected = _next_of(_acquiring(fleet, Opened(fleet, bid_for(fleet), heard)))
    granted = protocol.at_once(Opened(fleet, bid_for(fleet), heard._replace(alike=alike)))
    assert (_plain(granted) if granted else None) == (expected if took < 29 else None)


def test_late_majority_is_not_taken_at_once() -> None:
    """The validity ends before it was heard: that lock is nobody's, and the generator gives it back."""
    fleet = fleet_of("list", 3)
    grant = Answer(Said.GRANTED, 0, (1,))
    told = dict.fromkeys(range(3), grant)
    assert protocol.at_once(Opened(fleet, bid_for(fleet), Round(0.0, 29.0, told))) is not None
    late = Opened(fleet, bid_for(fleet), Round(0.0, 29.7, told))
    assert protocol.at_once(late) is None
    request = next(_acquiring(fleet, late))
    assert isinstance(request, Broadcast)
    assert request.command.script == "release"


@pytest.mark.parametrize("count", range(1, 8))
def test_what_is_hoped_for_is_enough_from_a_majority_alone(count: int) -> None:
    """Of one to seven nodes: told together, the same answers complete a request as they do one by one.

    Of four nodes two are no majority, though for a RELEASE the answers of two may be enough to know it lost.
    """
    fleet = fleet_of("list", count)
    granted = Granted(bid_for(fleet), 0, (1,), 130.0)
    for request, answer in (
        (protocol.opening(fleet, bid_for(fleet)), Answer(Said.GRANTED, 0, (1,))),
        (protocol.opening(fleet, bid_for(fleet)), Answer(Said.HELD, ttl=1.0)),
        (protocol.closing(fleet, granted), Answer(Said.RELEASED)),
        (protocol.closing(fleet, granted), Answer(Said.LOST)),
    ):
        for some in range(1, count + 1):
            together, singly = Ballot(request), Ballot(request)
            together.hear_alike(range(some), answer)
            for node in range(some):
                singly.hear(node, answer)
            assert together.complete is singly.complete, (request.command.script, answer, some)
            assert together.close() == singly.close()


def test_answer_that_came_before_takes_part() -> None:
    """Who has heard something else already decides by all of it."""
    fleet = fleet_of("list", 5)
    ballot = Ballot(protocol.opening(fleet, bid_for(fleet)))
    ballot.hear(4, Answer(Said.HELD, ttl=1.0))
    ballot.hear_alike(range(3), Answer(Said.GRANTED, 0, (1,)))
    assert ballot.complete
    assert ballot.close()[4].said is Said.HELD


def _acquiring(fleet: Fleet, opened: Opened | None = None) -> Generator[Request, Any, Granted]:
    return protocol.acquire(
        lambda: fleet,
        bid_for,
        timeout=None,
        grace=0.5,
        jitter=lambda: 0.5,
        opened=opened,
    )


def _next_of(generator: Generator[Request, Any, Granted], *sent: Round) -> object:
    """Return what comes next: a request, the end, or an error."""
    try:
        return _plain(generator.send(sent[0]) if sent else next(generator))
    except StopIteration as end:
        return _plain(end.value)
    except FencelockError as error:
        return type(error), str(error)


def _plain(thing: Request | Granted) -> object:
    """Return what can be compared of it."""
    if isinstance(thing, Broadcast):
        return thing.command, list(thing.nodes), thing.patience, thing.least, thing.hoped
    if isinstance(thing, Sleep):
        return thing
    bid, *rest = astuple(thing)
    return bid, rest
