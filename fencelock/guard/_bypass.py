"""Whether a statement goes around the guard: that is said of it, of its connection or engine, or for a block.

Every part of the guard asks here. A block is of the thread, task or greenlet that has entered it, so others
on the same session or connection stay guarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from fencelock._owners import current_owner
from fencelock.errors import UnfencedWriteError
from fencelock.guard.sessions import blocking, owner_of

if TYPE_CHECKING:
    from fencelock.guard.sessions import AnySession

BYPASS: Final = "bypass"
"""The value of the execution option `fencelock` that lets a statement pass unguarded."""

_blocks: Final[list[tuple[object, Session | Connection]]] = []
"""The open blocks: the owner, and the session or connection."""


@contextmanager
def bypass(target: AnySession) -> Iterator[None]:
    """Have what a session or connection executes in this block go around the guard.

    For seeds, repairs and tests, at times when no holder is at work: nothing is compared or refused. Rows get
    new write ids all the same. Other threads and tasks are guarded as ever, also on the same connection. At
    the end of the block, however it is left, everything is as before. Blocks may be inside each other; for
    asyncio it is a plain `with`. What is pending in a session when the block ends is guarded when it is
    flushed: flush in the block.

    Example:
        ```python
        with fencelock.bypass(session):
            session.execute(text("UPDATE orders SET status = 'new'"))
        ```

    Raises:
        TypeError: for anything else than a session or connection.
    """
    block = current_owner(), blocking(target)
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def is_bypassed(options: Mapping[str, Any], connection: Connection) -> bool:
    """Tell whether a statement with these execution options goes around the guard on a connection.

    Raises:
        ValueError: if the option has a value that it does not know.
    """
    choice = options.get("fencelock")
    if choice not in (None, BYPASS):
        raise ValueError(f"the execution option fencelock is {BYPASS!r} or left away, not {choice!r}")
    if choice is not None or not _blocks:
        return choice is not None
    here = current_owner()
    return any(
        owner == here and target in (connection, owner_of(connection)) for owner, target in tuple(_blocks)
    )


def refuse_bypass(options: Mapping[str, Any], connection: Connection) -> None:
    """Refuse to do fenced work where everything passes unguarded.

    Raises:
        UnfencedWriteError: if these execution options say so, or a block of this connection.
    """
    if is_bypassed(options, connection):
        raise UnfencedWriteError(
            f"nothing can be claimed or written with a token under execution_options(fencelock={BYPASS!r}), "
            f"where no fence is raised or compared; use an engine, a connection and a statement without it"
        )
