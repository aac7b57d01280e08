"""What workers do, as generators: each step that they yield can be taken by blocking code, and by a task."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, NoReturn, TypeVar

from fencelock import _generators
from fencelock._generators import Call, Steps

_T = TypeVar("_T")


def sleep(seconds: float) -> Call:
    return Call(partial(time.sleep, seconds), partial(asyncio.sleep, seconds))


def _refuse(step: Any) -> NoReturn:
    raise TypeError(f"a worker yields calls, not {step!r}")


def run(steps: Steps[_T]) -> _T:
    return _generators.run(steps, _refuse)


async def run_in_task(steps: Steps[_T]) -> _T:
    return await _generators.run_async(steps, _refuse)
