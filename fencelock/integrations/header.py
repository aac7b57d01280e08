"""The header `Fencing-Token`: several leases as text, `order:1=123;stock:7=45`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Final

from fencelock.lease import Lease, held_leases, holding

HEADER: Final = "Fencing-Token"
#: The most bytes that most servers and proxies accept in one header. One lease takes up to 3,080 bytes.
MAX_LENGTH: Final = 8000


def to_header(leases: Iterable[Lease]) -> str:
    """Return the value of the header for several leases.

    ```python
    to_header([Lease("order:1", 123), Lease("stock:7", 45)])     # "order:1=123;stock:7=45"
    ```

    Raises:
        ValueError: the value would be longer than `MAX_LENGTH`.
    """
    text = ";".join(lease.to_header() for lease in leases)
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{HEADER} would have {len(text)} bytes, and at most {MAX_LENGTH} travel: send it while fewer "
            "leases are held"
        )
    return text


def from_header(text: str) -> tuple[Lease, ...]:
    """Return the leases that a header names; none for an empty header.

    ```python
    order, stock = from_header("order:1=123;stock:7=45")
    ```

    Raises:
        ValueError: the text is no such header, is too long, or names a resource twice.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"{HEADER} has {len(text)} bytes, and at most {MAX_LENGTH} are read")
    leases = tuple(map(Lease.from_header, text.split(";"))) if text else ()
    if len({lease.resource for lease in leases}) < len(leases):
        raise ValueError(f"{HEADER} names a resource twice: {text[:80]!r}")
    return leases


def held() -> dict[str, str]:
    """Return the header of the leases held; an empty dict if none is held.

    ```python
    with fenced_lock("order:1"):
        headers = held()                         # {"Fencing-Token": "order:1=123"}
    ```

    Raises:
        LockLostError: a lease has ended.
        CommitInDoubtError: a transaction under a lease may still be committed.
        ValueError: see `to_header`.
    """
    leases = held_leases()
    for lease in leases:
        lease._token_to_write()
    return {HEADER: to_header(leases)} if leases else {}


def bound(text: str) -> AbstractContextManager[None]:
    """Write under the leases of a header in a `with` block, and in tasks that the block starts.

    ```python
    with bound("order:1=123"), Session(engine) as session:
        ...                                      # written under the token 123
    ```

    This process does not check when these leases end, and neither renews nor releases them.

    Returns:
        The context manager.

    Raises:
        ValueError: see `from_header`.
    """
    return holding(from_header(text))
