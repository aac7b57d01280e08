"""What workers do, as generators: each step that they yield can be taken by blocking code, and by a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fencelock._steps import Steps, block, wait_for

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Step:
    blocking: Callable[[], Any]
    waiting: Callable[[], Awaitable[Any]]


def sleep(seconds: float) -> Step:
    return Step(partial(time.sleep, seconds), partial(asyncio.sleep, seconds))


def run(steps: Steps[_T]) -> _T:
    return block(steps, lambda step: step.blocking())


async def run_in_task(steps: Steps[_T]) -> _T:
    return await wait_for(steps, lambda step: step.waiting())
