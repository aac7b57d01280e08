"""Waiting acquisitions: tells listeners of them, ends those that must not wait, and explains failures."""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from fencelock import _events
from fencelock._events import LockWaiting
from fencelock._generators import Steps
from fencelock._owners import name_of_process, running_loop
from fencelock._process import in_forked_child
from fencelock.authority.base import Authority, GivenUp, Grant, named
from fencelock.errors import AuthorityError, LockError, LockTimeoutError
from fencelock.holder import Holder
from fencelock.lease import held_leases, latest_session
from fencelock.lock.hold import Block, holds_of

logger: logging.Logger = logging.getLogger("fencelock.lock")

#: The resources in the warning about a connection that is kept during a wait; empty before the warning.
_warned: list[tuple[str, ...]] = []

#: Seconds after which an acquisition with `if_held="skip"` gives up, even if no holder is known.
_UNDECIDED: Final = 10.0
_CONTEST: Final = 0.1  # seconds for which such an acquisition contends before it checks for a holder again

_OTHER_CALLER: Final = (
    "this same thread has acquired it, {}, in another context. A lock is entered again only where its "
    "lease is held: acquire and release it within one call, or hand the lease over"
)

_KEPT: Final = (
    "its block was left, and the lock, acquired {}, is kept until the transaction that wrote under it ends: "
    "commit or roll back. A test with an outer transaction needs the fixture fencelock_authority"
)

_PARENT: Final = (
    "the task or thread that started this one holds it, and if it waits for this one, both wait in vain: "
    "take the lock in only one of them. A task or an asyncio.to_thread call that the holder starts may "
    "write under its lease"
)


#: Name and token of the lock under which `fencelock run` has started this process; None without that.
of_runner: Final = os.environ.get("FENCELOCK_RESOURCE"), os.environ.get("FENCELOCK_TOKEN")

_RUNNER: Final = (
    "{!r} is held by the `fencelock run` that has started this program, and the program would wait for "
    "itself: do not lock it again. Write under its token: bind(session, "
    "Lease(os.environ['FENCELOCK_RESOURCE'], int(os.environ['FENCELOCK_TOKEN'])))"
)


def acquire_beside_runner_gen(authority: Authority, acquiring: Steps[Grant]) -> Steps[Grant]:
    """Acquire, but raise LockError if the lock is that of `fencelock run`, which started this process."""
    name, token = of_runner
    found = yield from authority.inspect_gen((str(name),))
    if found and str(found[0].token) == token:
        raise LockError(_RUNNER.format(name))
    return (yield from acquiring)


def go_on_waiting(block: Block, resources: tuple[str, ...], template: str) -> None:
    """Tell listeners once that an acquisition waits; raise GivenUp if it was cancelled."""
    if block.given_up:
        raise GivenUp
    if not block.had_to_wait:
        block.had_to_wait = True
        _warn_of_connection(resources)
        if _events.listeners:
            _events.tell(LockWaiting(block.authority, resources, template))


def acquire_unless_held_gen(
    authority: Any, resources: tuple[str, ...], acquire: Callable[..., Steps[Grant]]
) -> Steps[Grant]:
    """Acquire, but raise LockTimeoutError as soon as another holder is known.

    Contenders that begin together may divide the votes of the nodes. For `_UNDECIDED` seconds, they go on
    until one has the lock, because otherwise all could give up.
    """
    until, timeout = time.monotonic() + _UNDECIDED, 0.0
    while True:
        try:
            return (yield from acquire(timeout=timeout))
        except LockTimeoutError:
            if time.monotonic() > until or (yield from authority.is_held_gen(resources)):
                raise
        timeout = _CONTEST


def _warn_of_connection(resources: tuple[str, ...]) -> None:
    """Log, once in a process, that a caller keeps a connection of the program while it waits."""
    session = latest() if (latest := latest_session.get()) is not None else None
    if session is not None and session.in_transaction() and not _warned:
        _warned.append(resources)
        logger.warning(
            "%s: a session of this thread or task has begun a transaction, and keeps a connection while "
            "the lock is waited for; so waiting callers can use up the pool. Call session.rollback() "
            "before the lock, or read inside it. This warning comes once",
            named(resources),
        )


#: The looks for holders that are under way. If thousands give up at once, most errors name no holder, because
#: their looks would keep an event loop from renewing its leases.
_looks: Final[set[object]] = set()
_MOST_LOOKS: Final = 20
in_forked_child(_looks.clear)


def with_reason(error: LockTimeoutError, authority: Authority, resources: Sequence[str]) -> LockTimeoutError:
    """Return the error, with the reason added if the caller waits in vain for a lock of this process."""
    holds = [hold for hold in holds_of(authority, resources) if not hold.lost]
    inherited = held_leases()
    here = None if running_loop() else threading.get_ident()
    why = _PARENT if any(lease in inherited for hold in holds for lease in hold.leases) else ""
    for hold in holds:
        is_kept = hold.leases[0]._left
        if is_kept or (hold.thread == here and hold.loop() is None):
            place = "somewhere" if hold.place is None else f"in {hold.place[0].co_filename}:{hold.place[1]}"
            why = (_KEPT if is_kept else _OTHER_CALLER).format(place)
            break
    return LockTimeoutError(f"{error}; {why}", holder_ttl=error.holder_ttl) if why else error


def name_holder_gen(authority: Authority, resources: tuple[str, ...], error: LockTimeoutError) -> Steps[None]:
    """Name the process that holds the lock in an error, if the authority knows it."""
    for name in resources:
        try:
            found = error._seen  # noqa: SLF001 - what the authority has read
            if found is None and len(_looks) >= _MOST_LOOKS:
                return
            if found is None:
                _looks.add(look := object())
                try:
                    found = yield from authority.inspect_gen((name,))
                finally:
                    _looks.discard(look)
        except AuthorityError:
            return
        found = [info for info in found if info.resource == name]
        if found:
            error.holder = found[0].holder
            said, by = str(error), f"is held by {error.holder}"
            if error.holder is not None:
                ours = Holder.of(name_of_process(os.getpid()), error.holder.since)
                by += " (this process)" if error.holder == ours else ""
            else:
                free = shlex.join(["fencelock", "release", name, "--force", "--reason", "why"])
                by = f"is held by a key that is no lease of fencelock (`{free}` frees it)"
            one = len(resources) == 1
            error.args = (said.replace("is held by another", by) if one else f"{said}. {name!r} {by}",)
            return
