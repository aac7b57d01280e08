"""Runs generators: executes each step that a generator yields, and sends its result back.

Locks and authorities write their operations once, as such generators. `run` executes the steps in blocking
code, and `run_async` in a task. The error of a step, or of a signal handler, is thrown into the generator.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

Steps = Generator[Any, Any, _T]


class Call(NamedTuple):
    """A step that needs no connection: blocking code calls `blocking`, a task awaits `waiting`."""

    blocking: Callable[[], Any]
    waiting: Callable[[], Awaitable[Any]]


def run(steps: Steps[_T], do: Callable[[Any], Any]) -> _T:
    """Run a generator in blocking code; `do` executes all steps except a `Call`."""
    # Python runs signal handlers after calls into C and at each turn of a loop. The inner loop is inside the
    # `try`, so that the generator gets the error of a handler that raises there.
    error: BaseException | None = None
    while True:
        try:
            answer: Any = None
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                error = answer = None
                answer = step.blocking() if type(step) is Call else do(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as caught:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            error = caught


async def run_async(
    steps: Steps[_T], do: Callable[[Any], Awaitable[Any]], tell: Callable[[Any], Any] | None = None
) -> _T:
    """Run a generator in a task; `do` executes all steps except a `Call`.

    If the coroutine is closed and `tell` is given, the generator gets a CancelledError. `tell` executes its
    further steps, and must not wait.
    """
    error: BaseException | None = None
    answer: Any = None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        error = answer = None
        try:
            answer = await (step.waiting() if type(step) is Call else do(step))
        except GeneratorExit as caught:
            if tell is not None:
                _cancel(steps, tell)
                raise
            error = caught
        except BaseException as caught:  # noqa: BLE001 - the generator decides what to do about it
            error = caught


def _cancel(steps: Steps[Any], tell: Callable[[Any], Any]) -> None:
    with suppress(BaseException):
        step = steps.throw(asyncio.CancelledError())
        while True:
            step = steps.send(tell(step))
