"""The messages of etcd that a lock needs, in protobuf; the numbers are those of etcd's `rpc.proto`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from fencelock.errors import AuthorityError

_T = TypeVar("_T")

_KEEPS_EIGHT_BYTES: Final = (1 << 64) - 1
_SHORT: Final = tuple(bytes([number]) for number in range(0x80))

# Status codes of gRPC.
OK: Final = 0
UNKNOWN: Final = 2
NOT_FOUND: Final = 5
UNAVAILABLE: Final = 14

#: The results, and the targets, of a comparison.
EQUAL, GREATER, LESS = 0, 1, 2
VERSION, CREATE, VALUE, LEASE = 0, 1, 3, 4
_FIELD_OF_TARGET: Final = {VERSION: 4, CREATE: 5, VALUE: 7, LEASE: 8}


class Call(NamedTuple):
    """A call of a method.

    With `goes_on`, the stream stays open, and the server sends more answers; with `most`, until so many came.
    """

    path: bytes
    requests: Sequence[bytes]
    goes_on: bool = False
    most: int = 0

    def __repr__(self) -> str:  # without requests, because a login has the password
        return f"<Call of {self.path.decode()}>"


@dataclass(eq=False, slots=True)
class Answer:
    """The messages that a call has received, and its status, which is None before the call is over."""

    messages: list[bytes] = field(repr=False)  # the answer to a login has a token
    status: int | None = None
    detail: str = ""
    notify: Callable[[], object] = lambda: None  # called when a message or the status has arrived

    @property
    def is_over(self) -> bool:
        return self.status is not None

    @property
    def finds_no_lease(self) -> bool:
        """Whether there is no such lease; a proxy (`etcd grpc-proxy`) passes on the text, and no code."""
        return self.status == NOT_FOUND or "requested lease not found" in self.detail


def _varint(number: int) -> bytes:
    if 0 <= number <= 0x7F:
        return _SHORT[number]
    number &= _KEEPS_EIGHT_BYTES
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _int(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def fields_of(message: bytes) -> dict[int, list[Any]]:
    """Return the fields of a message by their numbers: ints or bytes; for fixed-length ones, empty bytes."""
    found: dict[int, list[Any]] = {}
    at, end = 0, len(message)
    try:
        while at < end:
            tag, at = _number_at(message, at)
            kind = tag & 7
            value: int | bytes
            if kind == 0:
                value, at = _number_at(message, at)
            elif kind == 2:
                length, at = _number_at(message, at)
                value, at = message[at : at + length], at + length
            else:
                value, at = b"", at + (8 if kind == 1 else 4)
            found.setdefault(tag >> 3, []).append(value)
    except IndexError:
        at = end + 1
    if at > end:
        raise ValueError("a message ends too early")
    return found


def _number_at(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return number, at
        shift += 7


def _reading(read: Callable[..., _T]) -> Callable[..., _T]:
    """Wrap a function that reads a message: whatever a server sends, the error is an AuthorityError."""

    @functools.wraps(read)
    def checked(*arguments: Any) -> _T:
        try:
            return read(*arguments)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise AuthorityError(f"etcd has sent a message that cannot be read ({error})") from error

    return checked


class KeyValue(NamedTuple):
    """A key: the revision that created it, its value, and its lease or 0."""

    key: bytes
    created: int
    value: bytes
    lease: int

    @classmethod
    def read(cls, message: bytes) -> KeyValue:
        its = fields_of(message)
        key, created, value, lease = its[1][0], its.get(2, [0])[0], its.get(5, [b""])[0], its.get(6, [0])[0]
        return cls(bytes(memoryview(key)), int(created), bytes(memoryview(value)), int(lease))


class Txn(NamedTuple):
    """The answer of a transaction."""

    succeeded: bool  # whether all comparisons were true
    revision: int  # the revision of the store after the transaction
    found: list[list[KeyValue]]  # for each operation, the keys that it has found

    @classmethod
    @_reading
    def read(cls, message: bytes, then: int, otherwise: int) -> Txn:
        """Read the answer of a transaction that has so many operations `then`, and `otherwise`."""
        its = fields_of(message)
        found = []
        for each in its.get(3, ()):
            operation = fields_of(each)
            found.append(_found(operation[1][0]) if 1 in operation else [])
        succeeded = its.get(2) == [1]
        if len(found) != (then if succeeded else otherwise):
            raise ValueError(f"it has {len(found)} results")
        return cls(succeeded, int(fields_of(its[1][0]).get(3, [0])[0]), found)


def _found(message: bytes) -> list[KeyValue]:
    return [KeyValue.read(each) for each in fields_of(message).get(2, ())]


_KV: Final = b"/etcdserverpb.KV/"
_LEASES: Final = b"/etcdserverpb.Lease/"


def grant(lease: int, ttl: int) -> Call:
    return Call(_LEASES + b"LeaseGrant", (_int(1, ttl) + _int(2, lease),))


def revoke(lease: int) -> Call:
    return Call(_LEASES + b"LeaseRevoke", (_int(1, lease),))


def keep_alive(leases: Sequence[int]) -> Call:
    """Return the call that extends leases; a proxy answers only while the stream is open."""
    return Call(
        _LEASES + b"LeaseKeepAlive", [_int(1, lease) for lease in leases], goes_on=True, most=len(leases)
    )


def time_to_live(lease: int) -> Call:
    return Call(_LEASES + b"LeaseTimeToLive", (_int(1, lease),))


@_reading
def lease_and_ttl(message: bytes) -> tuple[int, int]:
    """Return the lease of an answer, and the seconds that it lasts; 0 or less if there is none."""
    its = fields_of(message)
    seconds = its.get(3, [0])[0]
    return int(its.get(2, [0])[0]), seconds - (1 << 64) if seconds >> 63 else seconds


def watch(key: bytes, revision: int) -> Call:
    """Return the call that watches for the deletion of a key, from a revision on, with the filter NOPUT."""
    wanted = _bytes(1, key) + _int(3, revision) + _int(5, 0)
    return Call(b"/etcdserverpb.Watch/Watch", (_bytes(1, wanted),), goes_on=True)


@_reading
def has_ended(message: bytes) -> bool:
    """Return whether a watch reports that its key was deleted, or that the watch was cancelled."""
    its = fields_of(message)
    return 11 in its or 4 in its


def watch_is_over(answer: Answer) -> bool:
    return answer.is_over or any(map(has_ended, answer.messages))


def status() -> Call:
    return Call(b"/etcdserverpb.Maintenance/Status", (b"",))


@_reading
def version_of(message: bytes) -> str:
    return str(fields_of(message).get(2, [b""])[0].decode("ascii", "replace"))


def authenticate(user: str, password: str) -> Call:
    its = _bytes(1, user.encode()) + _bytes(2, password.encode())
    return Call(b"/etcdserverpb.Auth/Authenticate", (its,))


@_reading
def auth_token(message: bytes) -> bytes:
    return bytes(fields_of(message).get(2, [b""])[0])


def get(key: bytes) -> bytes:
    return _bytes(1, key)


def latest(key: bytes, end: bytes, limit: int, *, before: int = 0) -> bytes:
    """Return the request for the keys of a range that were created last, without their values.

    `before` leaves out keys that were created at this revision or later.
    """
    its = _bytes(1, key) + _bytes(2, end) + _int(3, limit) + _int(5, 2) + _int(6, 2) + _int(8, 1)
    return its + (_int(13, before - 1) if before else b"")


def earliest(key: bytes, end: bytes) -> bytes:
    """Return the request for the key of a range that was created first."""
    return _bytes(1, key) + _bytes(2, end) + _int(3, 1) + _int(5, 1) + _int(6, 2)


def page(key: bytes, end: bytes, limit: int) -> bytes:
    """Return the request for the first `limit` keys of a range, in the order of keys."""
    return _bytes(1, key) + _bytes(2, end) + _int(3, limit)


@_reading
def found_by(message: bytes) -> tuple[list[KeyValue], int]:
    """Return the keys in the answer to a range request, and how many keys the whole range has."""
    return _found(message), int(fields_of(message).get(4, [0])[0])


def range_call(request: bytes) -> Call:
    return Call(_KV + b"Range", (request,))


def read(request: bytes) -> bytes:
    """Return a request for a range as an operation of a transaction."""
    return _bytes(1, request)


def put(key: bytes, value: bytes, lease: int = 0) -> bytes:
    return _bytes(2, _bytes(1, key) + _bytes(2, value) + (_int(3, lease) if lease else b""))


def delete(key: bytes) -> bytes:
    return _bytes(3, _bytes(1, key))


def compare(key: bytes, target: int, result: int, value: int | bytes, *, end: bytes = b"") -> bytes:
    """Return a comparison of a key, or of every key up to `end`; of an absent key, all numbers are 0."""
    field = _FIELD_OF_TARGET[target]
    its = _int(1, result) + _int(2, target) + _bytes(3, key)
    its += _bytes(field, value) if isinstance(value, bytes) else _int(field, value)
    return its + (_bytes(64, end) if end else b"")


def txn(compares: Iterable[bytes], then: Iterable[bytes], otherwise: Iterable[bytes] = ()) -> Call:
    parts = [_bytes(1, each) for each in compares]
    parts += [_bytes(2, each) for each in then]
    parts += [_bytes(3, each) for each in otherwise]
    return Call(_KV + b"Txn", (b"".join(parts),))


def nested(compares: Iterable[bytes], then: Iterable[bytes]) -> bytes:
    return _bytes(4, txn(compares, then).requests[0])


def after(prefix: bytes) -> bytes:
    """Return the end of the range of all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
