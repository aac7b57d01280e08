"""The model of callers that want several names: no state is stuck, but in the control."""

from __future__ import annotations

import pytest

from proof import several


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("case", several.CASES)
def test_some_caller_can_always_acquire(case: str, *, faults: bool) -> None:
    """Although no kept name ends by itself, unless its caller has died."""
    count, stuck = several.stuck(several.Model(several.CASES[case], faults=faults))
    assert (count > 40, stuck) == (True, [])


def test_callers_with_orders_of_their_own_are_stuck() -> None:
    """The control."""
    assert several.stuck(several.Model(("ab", "ab", "ba"), in_order=False))[1]
