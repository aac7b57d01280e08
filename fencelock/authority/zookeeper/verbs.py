"""Requests to ZooKeeper: each is a function that sends the request with kazoo's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, NoNodeError, RolledBackError, RuntimeInconsistency

from fencelock.authority.zookeeper.session import Request

_PER_OPERATION: Final = 64  # bytes beside path and data
_MOST_BYTES: Final = 1_000_000  # of a transaction: servers close the connection at 1,048,575
NONCE_LENGTH: Final = 16  # characters of a nonce, with which the name of an entry begins
#: Operations of a transaction, by kazoo's names.
CREATE, CHECK, SET, DELETE = "create", "check", "set_data", "delete"
#: Errors that say that another client was quicker.
CHANGED: Final[tuple[type[Exception], ...]] = (BadVersionError, NoNodeError)


def transaction(*operations: tuple[Any, ...]) -> Request:
    """Return the request for a transaction; raise ValueError if servers would refuse its size."""
    sizes = (len(each) for _, *arguments in operations for each in arguments if isinstance(each, str | bytes))
    if sum(sizes) + len(operations) * _PER_OPERATION > _MOST_BYTES:
        raise ValueError(
            "these names are too long for one lock: ZooKeeper accepts a megabyte in a request, so lock what "
            "they have in common, or take several locks, always in the same order"
        )

    def begin(client: KazooClient) -> Any:
        transaction = client.transaction()
        for name, *arguments in operations:
            options = {"ephemeral": True, "sequence": True} if name == CREATE else {}
            getattr(transaction, name)(*arguments, **options)
        return transaction.commit_async()

    return begin


def refusal(done: Any) -> Exception | None:
    """Return why a transaction was refused, or None; kazoo returns errors instead of raising them."""
    if isinstance(done, Exception):
        return done
    errors = [each for each in done if isinstance(each, Exception)]
    telling = (each for each in errors if not isinstance(each, (RolledBackError, RuntimeInconsistency)))
    return next(telling, errors[0] if errors else None)


def children(path: str) -> Request:
    return lambda client: client.get_children_async(path)


def children_and_version(path: str) -> Request:
    """Return the request for the names of children, and for the node's `ZnodeStat`."""
    return lambda client: client.get_children_async(path, include_data=True)


def get(path: str) -> Request:
    return lambda client: client.get_async(path)


def get_acls(path: str) -> Request:
    return lambda client: client.get_acls_async(path)


def others(acls: Sequence[Any], own: Any) -> list[str]:
    """Return which identities beside the own one may change a node, or the nodes below it."""
    changing = 0b11110  # all rights but to read
    return [f"{acl.id.scheme}:{acl.id.id}" for acl in acls if acl.perms & changing and acl.id != own]


def exists(path: str) -> Request:
    return lambda client: client.exists_async(path)


def sync(path: str) -> Request:
    return lambda client: client.sync_async(path)


def create(path: str, data: bytes) -> Request:
    return lambda client: client.create_async(path, data)


def ensure_path(path: str) -> Request:
    return lambda client: client.ensure_path_async(path)


def delete(path: str, version: int = -1) -> Request:
    return lambda client: client.delete_async(path, version)


def set_data(path: str, data: bytes, version: int = -1) -> Request:
    return lambda client: client.set_async(path, data, version)


def distance(name: str, other: str) -> int:
    """Return how far `name` is behind `other` in a line, negative if it is before; 0 if a name has no number.

    ZooKeeper numbers the entries of a line with 32 bits; after the largest number, negative ones follow.
    """
    numbers = [each[NONCE_LENGTH + 1 :] for each in (name, other)]
    if not all(number.removeprefix("-").isdigit() for number in numbers):
        return 0
    first, second = map(int, numbers)
    return (first - second + 2**31) % 2**32 - 2**31


def in_order(names: Sequence[str]) -> list[str]:
    return sorted(names, key=lambda name: distance(name, names[0]))
