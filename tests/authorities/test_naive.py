"""The suite notices a naive authority, because that authority breaks each of these promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fencelock import Redlock
from proof.servers import Nodes
from tests.authorities import faces, test_cancellation, test_leases, test_tokens, test_waiting
from tests.authorities.kinds import Kind
from tests.authorities.naive import Forgetful, Naive
from tests.authorities.stage import Stage

#: What `pytest.raises` raises where nothing was raised.
_DID_NOT_RAISE = pytest.fail.Exception


@pytest.fixture(autouse=True)
def _is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is not released is waited for in vain."""
    monkeypatch.setattr(faces, "SOON", 0.5)


@pytest.fixture
def naive(tmp_path: Path) -> Stage:
    """The naive authority, in blocking code."""
    path = tmp_path / "naive.sqlite"
    Naive.create(path)
    return Stage(Kind("naive", lambda: Naive(path), ""), "blocking")


@pytest.mark.parametrize(
    "check",
    [
        test_tokens.test_tokens_are_unique_and_leases_exclusive,
        test_tokens.test_tokens_follow_real_time,
        test_tokens.test_remint_of_a_lost_grant_is_refused,
        test_tokens.test_remint_is_for_all_resources_or_none,
        test_tokens.test_an_expired_lease_is_granted_to_another,
        test_tokens.test_remint_is_refused_where_another_came_between,
        test_tokens.test_remint_of_a_released_grant_is_refused,
        test_waiting.test_a_refusal_leaves_nothing_of_the_others,
        test_tokens.test_the_second_release_returns_false,
        test_leases.test_an_extension_never_shortens,
    ],
)
def test_the_suite_finds_it_out(naive: Stage, check: Callable[[Stage], None]) -> None:
    with naive, pytest.raises((AssertionError, _DID_NOT_RAISE)):
        check(naive)


@pytest.mark.parametrize(
    "check",
    [
        test_waiting.test_one_try_is_granted_what_is_free,
        test_waiting.test_who_waits_is_granted_what_expires,
        test_leases.test_an_extension_keeps_the_token_and_moves_the_end,
        test_leases.test_closing_twice_and_going_on,
    ],
)
def test_what_it_keeps_is_not_held_against_it(naive: Stage, check: Callable[[Stage], None]) -> None:
    with naive:
        check(naive)


@pytest.mark.parametrize(
    "check",
    [
        test_cancellation.test_a_cancelled_acquisition_leaves_nothing,
        test_cancellation.test_a_cancelled_release_takes_place,
    ],
)
def test_the_suite_finds_out_what_a_cancellation_leaves(nodes: Nodes, check: Callable[[Stage], None]) -> None:
    urls = nodes.urls[:1]
    with Redlock(urls) as first:
        first.init(base=0)
    kind = Kind("forgetful", lambda: Forgetful(Redlock(urls)), "")
    with Stage(kind, "asyncio") as stage, pytest.raises(AssertionError):
        check(stage)
