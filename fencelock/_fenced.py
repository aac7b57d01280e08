"""`fenced` decorates a function, so that each call holds a lock that its arguments name."""

from __future__ import annotations

import functools
import inspect
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ParamSpec, Self, TypeVar, Unpack, cast

from fencelock._checks import check_result
from fencelock._locking import fenced_lock
from fencelock.errors import LockTimeoutError
from fencelock.lock.lock import FencedLock
from fencelock.lock.options import AllLockSettings

_P = ParamSpec("_P")
_R = TypeVar("_R")


def fenced(
    *templates: str | Callable[..., str], **settings: Unpack[AllLockSettings]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function or coroutine function, so that it holds `fenced_lock` on resources while it runs.

    ```python
    @fenced("order:{order_id}", ttl=15)
    def ship(order_id: int) -> None: ...

    @fenced("account:{source.id}", "account:{target.id}")
    async def transfer(source: Account, target: Account, amount: int) -> None: ...

    @fenced(lambda order: f"customer:{order.customer_id or order.guest_id}")
    def remind(order: Order) -> None: ...
    ```

    Args:
        *templates: names of resources. {name} is replaced by an argument of the call, or its default;
            {name.attribute}, {name[key]} and {name:format} work as in str.format, {self.id} in methods. A
            function is called with all arguments, also defaults, and must return the name.
        **settings: as for `fenced_lock`; the default authority is the one at the time of the call. With
            `if_held="skip"`, a call returns None if another holder has the lock; the function does not run.

    Returns:
        The decorator.

    Raises:
        TypeError: for arguments of the wrong kind, a field that is no parameter of the function, and a
            generator function, whose body would run after the release. A call of the function raises the
            errors of `acquire` and `release` of a `FencedLock`, and a ValueError if a field is None.
        ValueError: for a malformed template, or for settings out of range.
    """
    if not templates or not all(isinstance(template, str) or callable(template) for template in templates):
        raise TypeError('fenced needs the resource to lock: write @fenced("order:{order_id}")')
    fenced_lock("checks the settings", **settings)
    skips = settings.get("if_held") == "skip"

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = check_function(function, templates)

        def lock_for(*args: _P.args, **kwargs: _P.kwargs) -> FencedLock[Any]:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            lock: FencedLock[Any] = fenced_lock(*dict.fromkeys(fill(templates, call)), **settings)
            lock.template = ", ".join(each if isinstance(each, str) else _name(each) for each in templates)
            return lock

        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(_what_runs(function)):

            @functools.wraps(function)
            async def fenced_coroutine(*args: _P.args, **kwargs: _P.kwargs) -> Any:
                with _Skipping(skips=skips) as call:
                    async with lock_for(*args, **kwargs):
                        call.is_held = True
                        return await cast("Callable[_P, Awaitable[Any]]", function)(*args, **kwargs)

            return cast("Callable[_P, _R]", fenced_coroutine)

        @functools.wraps(function)
        def fenced_function(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with _Skipping(skips=skips) as call, lock_for(*args, **kwargs):
                call.is_held = True
                return check_result(_name(function), function(*args, **kwargs))
            return cast("_R", None)

        return fenced_function

    return decorate


def fill(templates: Sequence[str | Callable[..., str]], call: inspect.BoundArguments) -> list[str]:
    return [
        _Filling().vformat(template, (), call.arguments)
        if isinstance(template, str)
        else template(*call.args, **call.kwargs)
        for template in templates
    ]


class _Skipping:
    """Suppresses LockTimeoutError if `skips`, but not after `is_held`: then the function has raised it."""

    def __init__(self, *, skips: bool) -> None:
        self._skips = skips
        self.is_held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc_value: BaseException | None, traceback: object) -> bool:
        return self._skips and not self.is_held and isinstance(exc_value, LockTimeoutError)


class _Filling(string.Formatter):
    """Fills a template as str.format does, but refuses None: all calls with None would share one lock."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found, key = super().get_field(field_name, args, kwargs)
        if found is None:
            raise ValueError(f"{field_name} is None in this call, and names nothing to lock: give it a value")
        return found, key


def check_function(function: Any, templates: tuple[str | Callable[..., str], ...]) -> inspect.Signature:
    """Return a function's signature; raise TypeError or ValueError if it or a template is unsuitable."""
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"write @{type(function).__name__} above @fenced, not below it")
    if not callable(function) or isinstance(function, type):
        raise TypeError(f'fenced decorates a function, not {function!r}: write @fenced("order:{{order_id}}")')
    runs = _what_runs(function)
    if inspect.isgeneratorfunction(runs) or inspect.isasyncgenfunction(runs):
        raise TypeError(
            f"{_name(function)} is a generator, whose body runs after the call has returned: write "
            "`with fenced_lock(…)` inside it"
        )
    signature = inspect.signature(function)
    for template in templates:
        for field in _fields(template) if isinstance(template, str) else ():
            if field not in signature.parameters:
                raise TypeError(
                    f"{template!r} names {field or 'a field without a name'!r}, which is no parameter of "
                    f"{_name(function)}{signature}"
                )
    return signature


def _what_runs(function: Any) -> Any:
    """Return the function that a call runs: the one in a partial function, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


def _fields(template: str) -> list[str]:
    """Return the arguments that a template names; raise ValueError if the template is malformed."""
    names: list[str] = []
    try:
        for _, field, inner, conversion in string.Formatter().parse(template):
            string.Formatter().convert_field("", conversion)
            if field is not None:
                names += [field.partition(".")[0].partition("[")[0], *_fields(inner or "")]
    except ValueError as error:
        raise ValueError(f"{template!r} is no template such as 'order:{{order_id}}': {error}") from None
    return names
