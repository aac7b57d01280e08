"""`fenced_once` makes a function one transaction under a lock, whose work is done once for each key."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, Unpack, overload

from sqlalchemy import Engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencelock._checks import check_result
from fencelock._fenced import check_function, fill
from fencelock._locking import fenced_lock
from fencelock.guard import once
from fencelock.guard.receipts import working
from fencelock.lock.options import AllLockSettings
from fencelock.transaction import transaction_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker

    Source = Engine | sessionmaker[Any] | scoped_session[Any] | Session
    AsyncSource = AsyncEngine | async_sessionmaker[Any] | async_scoped_session[Any] | AsyncSession

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Decorator(Protocol):
    @overload
    def __call__(
        self, function: Callable[Concatenate[AsyncSession, _P], Awaitable[_R]], /
    ) -> Callable[Concatenate[AsyncSource, _P], Awaitable[_R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Session, _P], _R], /
    ) -> Callable[Concatenate[Source, _P], _R]: ...


def fenced_once(
    key: str | Callable[..., str],
    *resources: str | Callable[..., str],
    fingerprint: Callable[..., Any] | None = None,
    retries: int = 2,
    gate: bool = True,
    **settings: Unpack[AllLockSettings],
) -> _Decorator:
    """Decorate a function or coroutine function, so that its work is done once for each key.

    ```python
    @fenced_once("deposit:{request_id}", "account:{account}")
    def deposit(session: Session, request_id: str, account: int, cents: int) -> dict[str, int]:
        its = session.get_one(Account, account)
        its.balance += cents
        return {"balance": its.balance}

    deposit(engine, "r-17", 1, 500)              # {"balance": 500}
    deposit(engine, "r-17", 1, 500)              # the same, and nothing was added
    ```

    The first parameter of the function is a session. A call passes an engine, a sessionmaker or a session in
    its place. The call locks the resources, begins a transaction, and looks for the receipt of the key. If
    the work was done before, the stored result is returned, and the function is not called. Otherwise the
    receipt is committed together with the writes of the function and its result, which must be plain data of
    JSON. If the outcome of the COMMIT is unknown, the transaction is run again, up to `retries` times.

    Args:
        key: names the receipt: a template of the arguments, as for `fenced`, or a function of them.
        *resources: name the resources to lock: templates or functions, too.
        fingerprint: a function of all arguments; for a repeated call, it must return the same as for the
            first. By default it returns the arguments that differ from their defaults, without the session.
            These must be plain data.
        retries: how often to try again after a COMMIT in doubt.
        gate: as for `fenced_transaction`.
        **settings: as for `fenced_lock`.

    Returns:
        The decorator.

    Raises:
        TypeError: for arguments of the wrong kind, and for a method. Calling raises the errors of
            `fenced_transaction` and `once`.
        ValueError: for arguments out of range, and for malformed templates.
    """
    if not resources:
        raise TypeError(
            "fenced_once needs the resource to lock, after the key: write "
            '@fenced_once("deposit:{request_id}", "account:{account}"). For a receipt without a lock, call '
            "once(session, key)"
        )
    fenced_lock("checks the settings", **settings)

    def decorate(function: Any) -> Any:
        signature = check_function(function, (key, *resources))
        if next(iter(signature.parameters), "self") in {"self", "cls"}:
            raise TypeError(
                f"fenced_once takes a function whose first parameter is a session, not {function!r}"
            )

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Call, Any]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            name, *names = fill((key, *resources), bound)
            first, *others = bound.arguments
            # A parameter that is new, and has its default, must not make another request of an old one.
            asked = {
                name: value
                for name, value in bound.arguments.items()
                if name in others and not _is_default(value, signature.parameters[name].default)
            }
            if fingerprint is not None:
                asked = fingerprint(*bound.args, **bound.kwargs)
            source = bound.arguments[first]
            its = transaction_of(source, tuple(names), retries=retries, gate=gate, settings=settings)
            return _Call(function, bound, name, asked), its

        @functools.wraps(function)
        def function_once(*args: Any, **kwargs: Any) -> Any:
            call, transaction = begin(args, kwargs)
            return transaction.run(call.in_session)

        @functools.wraps(function)
        async def coroutine_once(*args: Any, **kwargs: Any) -> Any:
            call, transaction = begin(args, kwargs)
            return await transaction.run(call.in_async_session)

        return coroutine_once if inspect.iscoroutinefunction(function) else function_once

    return decorate


def _is_default(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


class _Call(NamedTuple):
    """One call of a decorated function; `key` and `fingerprint` are those of its receipt."""

    function: Callable[..., Any]
    bound: inspect.BoundArguments
    key: str
    fingerprint: Any

    def in_session(self, session: Session) -> Any:
        receipt = once(session, self.key, fingerprint=self.fingerprint)
        if not receipt.done:
            with working(session, receipt):
                result = check_result("the function of fenced_once", self._work(session))
            receipt.result = result
        return receipt.result

    async def in_async_session(self, session: AsyncSession) -> Any:
        receipt = await once(session, self.key, fingerprint=self.fingerprint)
        if not receipt.done:
            with working(session.sync_session, receipt):
                result = await self._work(session)
            receipt.result = result
        return receipt.result

    def _work(self, session: object) -> Any:
        self.bound.arguments[next(iter(self.bound.arguments))] = session
        return self.function(*self.bound.args, **self.bound.kwargs)
