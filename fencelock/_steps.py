"""The drivers of generators above the authorities: each step that is yielded is done, and its answer sent.

The error of a step, or of a signal handler, is thrown into the generator, which decides what to do about it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")

Steps = Generator[Any, Any, _T]


def block(steps: Steps[_T], do: Callable[[Any], Any]) -> _T:
    """Take steps to their end, blocking.

    Python looks for signals behind calls into C and where a loop goes round. The inner loop is inside the
    `try`, so the steps hear of a handler that raises there. `do` is written in Python, which loses no answer.
    """
    error: BaseException | None = None
    while True:
        try:
            answer: Any = None
            while True:
                step = steps.send(answer) if error is None else steps.throw(error)
                error = answer = None
                answer = do(step)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as caught:
            if inspect.getgeneratorstate(steps) == inspect.GEN_CLOSED:
                raise
            error = caught


async def wait_for(steps: Steps[_T], do: Callable[[Any], Awaitable[Any]]) -> _T:
    error: BaseException | None = None
    answer: Any = None
    while True:
        try:
            step = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        error = answer = None
        try:
            answer = await do(step)
        except BaseException as caught:  # noqa: BLE001 - the steps decide what to do about it
            error = caught
