"""A forked child holds nothing, uses no connection of its parent, and is refused its parent's locks."""

from __future__ import annotations

import pytest

from tests.authorities.children import run
from tests.authorities.kinds import EACH_DRIVER
from tests.authorities.stage import Stage

# One driver of each database for a loop of its own, and one in threads of a loop.
CASES = [each for each in EACH_DRIVER if not each.startswith(("psycopg_async", "asyncmy"))]


@pytest.mark.parametrize("stage", [*CASES, "postgresql, asyncio"], indirect=True)
def test_a_fork_shares_the_leases_and_no_connection(stage: Stage) -> None:
    """The child holds nothing, is refused what the parent holds, and waits with ears of its own.

    Both go on at once, and the child's end ends nothing of the parent's.
    """
    said = run(f"fork_{stage.world}", stage.kind.url)
    child = {"refused", "lost", "keeps out of it", "named", "used", "waited", "is called"}
    assert said == {
        "parent": True,
        "waited": True,
        "children": [dict.fromkeys(child, True)] * 2,
        "extended": True,
        "stays held": True,
        "goes on": True,
        "released": True,
        "free": True,
    }
