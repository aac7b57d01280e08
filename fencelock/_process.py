"""Forks: the one place that tells objects and modules that they are in a forked child."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

# A child has one thread, and copies of everything else. Another thread of the parent may have held a mutex;
# its owner does not exist in the child. Two processes that use one connection would get each other's answers.
# So all that has a mutex, a thread or a connection starts over in the child, before other code runs there. No
# call compares process ids.
#
# An object registers when it has all that `begin_in_child` needs, because another thread may fork in the
# middle of its `__init__`. Its copy in a child is registered already, so grandchildren start over, too.
#
# uWSGI forks without Python's hooks, unless it has the option `py-call-osafterfork`, but it has its own hook.
# Another program that embeds Python, and forks, must call `PyOS_AfterFork_Child`.

_objects: WeakSet[Any] = WeakSet()
_functions: list[Callable[[], object]] = []


def start_over_in_children(each: Any) -> None:
    """Call `begin_in_child` of an object in each forked child; once more if the call is interrupted."""
    _objects.add(each)


def in_forked_child(function: Callable[[], object]) -> None:
    """Call a function in each forked child; for modules, because it is kept for ever."""
    _functions.append(function)


def _start_over() -> None:
    left = [*(each.begin_in_child for each in _objects), *_functions]
    failed: object = None
    error: BaseException | None = None
    while left:
        try:
            while left:
                left[-1]()
                left.pop()
        except BaseException as caught:  # noqa: BLE001 - perhaps a signal handler's; the others start over, too
            error = caught
            if left and left[-1] is failed:
                left.pop()
            elif left:
                failed = left[-1]
    if error is not None:
        raise error  # Python prints it


def _hook_into(uwsgi: Any) -> None:
    try:
        # Its import replaces uWSGI's hook by one that calls all functions of this list.
        importlib.import_module("uwsgidecorators").postfork_chain.append(_start_over)
    except Exception:  # noqa: BLE001 - it raises one without a master process, and no program can import it then
        uwsgi.post_fork_hook = _start_over


if hasattr(os, "register_at_fork"):  # some systems cannot fork
    os.register_at_fork(after_in_child=_start_over)
if hasattr(sys.modules.get("uwsgi"), "masterpid"):  # this process is uWSGI
    _hook_into(sys.modules["uwsgi"])
