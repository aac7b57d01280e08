"""Write ids: what an object was computed from. Each write gives its row a new one; they have no order.

They come from the operating system, because `random` may be seeded alike in two processes.
"""

from __future__ import annotations

from secrets import randbelow
from typing import Final

#: Ids are below it, so that JSON and web forms bring them back as they were.
LIMIT: Final = 2**53
#: The id of an object that is of two versions: no row has it.
MIXED: Final = -1


def new_write_id() -> int:
    """Return an id that no write has had; never 0, which rows have that were made without the guard."""
    return 1 + randbelow(LIMIT - 1)


def moved(write_id: int, by: int) -> int:
    """Return the id that a statement which moves ids gives to a row with this one."""
    return (write_id + by) % LIMIT if write_id >= 0 else MIXED
