"""Whether a statement goes around the guard: that is said of it, of its connection or engine, or for a block.

Apart from `sessions` because every part of the guard asks here. A block is of the thread, task or greenlet
that has entered it, so others on the same session or connection stay guarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session

from fencelock._owners import current_owner
from fencelock.guard._sqlalchemy import taking_part_in

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    AnySession: TypeAlias = (
        Session
        | Connection
        | AsyncSession
        | AsyncConnection
        | scoped_session[Any]
        | async_scoped_session[Any]
    )

BYPASS: Final = "bypass"
"""The value of the execution option `fencelock` that lets a statement pass unguarded."""

_blocks: Final[list[tuple[object, Session | Connection]]] = []
"""The open blocks: the owner, and the session or connection."""


@contextmanager
def bypass(target: AnySession) -> Iterator[None]:
    """Have what a session or connection executes in this block go around the guard.

    For seeds, repairs and tests, at times when no holder is at work: nothing is compared, stamped or refused.
    Other threads and tasks are guarded as ever, also on the same connection. At the end of the block, however
    it is left, everything is as before. Blocks may be inside each other; for asyncio it is a plain `with`.
    What is pending in a session when the block ends is guarded when it is flushed: flush in the block.

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
    return choice is not None or (bool(_blocks) and _is_in_block(connection))


def _is_in_block(connection: Connection) -> bool:
    owner = current_owner()
    return any(
        target is connection or (isinstance(target, Session) and connection in connections_of(target))
        for entered, target in tuple(_blocks)  # other threads add to them meanwhile
        if entered == owner
    )


def connections_of(session: Session) -> set[Connection]:
    """Return the connections of a session's transaction."""
    transaction = session.get_transaction()
    return {connection for connection, _, _ in ([] if transaction is None else taking_part_in(transaction))}


def blocking(target: object) -> Session | Connection:
    """Return the session or connection behind the asyncio and scoped facades.

    Raises:
        TypeError: if it is neither.
    """
    registry = getattr(target, "registry", None)
    if callable(registry):
        target = registry()
    for attribute in ("sync_session", "sync_connection"):
        target = getattr(target, attribute, target)
    if not isinstance(target, Session | Connection):
        raise TypeError(f"expected a session or a connection, not {type(target).__name__}")
    return target
