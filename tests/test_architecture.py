"""Which room may know what, checked rather than hoped for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterable
from pathlib import Path

import pytest

import fencelock

PACKAGE = Path(fencelock.__file__).parent


def imports_of(path: Path) -> set[str]:
    """Return the full names of what a module imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def loaded_by(module: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after importing one, without `fencelock` itself.

    The package's own `__init__` names both halves, so it is put aside: what counts is what the half needs.
    """
    code = (
        "import sys, types; package = types.ModuleType('fencelock'); "
        f"package.__path__ = [{str(PACKAGE)!r}]; sys.modules['fencelock'] = package; "
        f"import {module}; print(*sys.modules)"
    )
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
    )


@pytest.mark.parametrize(("room", "other"), [("guard", "authority"), ("authority", "guard")])
def test_halves_never_import_each_other(room: str, other: str) -> None:
    """Neither directly nor in a function."""
    for path in (PACKAGE / room).rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith(f"fencelock.{other}")], path


def test_guard_loads_nothing_of_redis() -> None:
    """Also not through a third module."""
    loaded = loaded_by("fencelock.guard")
    assert "sqlalchemy" in loaded
    assert not {name for name in loaded if name.split(".")[0] in {"redis", "hiredis", "valkey"}}
    assert not {name for name in loaded if name.startswith("fencelock.authority")}


def test_authority_loads_no_engine_and_no_orm() -> None:
    """The errors need one mixin of SQLAlchemy; that is all the two halves share with it."""
    loaded = loaded_by("fencelock.authority.redlock.redlock")
    assert "redis" in loaded
    assert "sqlalchemy.orm" not in loaded
    assert not {name for name in loaded if name.startswith("fencelock.guard")}


def runtime_imports_of(path: Path) -> set[str]:
    """Return the full names of what a module imports when it runs, in functions too; not for types only."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


MODULES = {
    "fencelock." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
}


def reached_from(names: Iterable[str]) -> set[str]:
    """Return the modules that these import, and those that they need in turn."""
    todo, reached = list(names), set[str]()
    while todo:
        for name in runtime_imports_of(MODULES[todo.pop()]) & MODULES.keys() - reached:
            reached.add(name)
            todo.append(name)
    return reached


def test_no_circle_joins_settings_lock_and_authorities() -> None:
    """What an authority needs leads back to neither of them."""
    for room in ("authority", "renewal"):
        reached = reached_from(name for name in MODULES if name.startswith(f"fencelock.{room}"))
        assert not {"fencelock.settings", "fencelock.lock.lock", "fencelock.lock.hold"} & reached, room


def test_two_functions_drive_the_steps_above_the_nodes() -> None:
    """`block` and `wait_for`: a loop of its own would soon lose an answer to a signal handler that raises."""
    rooms = [
        path for room in ("lock", "renewal", "authority/database") for path in (PACKAGE / room).glob("*.py")
    ]
    for path in [*rooms, PACKAGE / "authority" / "stepped.py"]:
        assert not re.search(r"next\(steps\)|steps\.(send|throw)\(", path.read_text()), path


STOREYS_OF_GUARD = (
    "_sqlalchemy",
    "dialects events sessions tables",
    "endings",
    "conditions leases trigger_sql",
    "_connecting objects text triggers verdict",
    "statements",
    "_install",
    "fences model sql",
    "claim gate",
    "upsert",
)
"""The rooms of the guard from the ground up: each one knows only rooms below it."""

STOREY = {
    f"fencelock.guard.{room}": storey
    for storey, rooms in enumerate(STOREYS_OF_GUARD)
    for room in rooms.split()
}


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("fencelock.guard.")])
def test_a_room_of_the_guard_knows_only_rooms_below_it(name: str) -> None:
    """So there is no circle: imports in functions count, too. A new room is added to the table."""
    known = {found for found in runtime_imports_of(MODULES[name]) if found in STOREY}
    assert not {found for found in known if STOREY[found] >= STOREY[name]}


def test_each_room_of_the_guard_is_small() -> None:
    """One sitting is enough to read it."""
    lines = {name: MODULES[name].read_text().count("\n") for name in STOREY}
    assert not {name: count for name, count in lines.items() if count > 450}


def test_public_names_are_listed_and_documented() -> None:
    """`fencelock.__all__` lists all that is visible, and each name in it says what it promises."""
    assert {"FencedLock", "Lease", "Redlock", "configure", "fenced_lock"} <= set(fencelock.__all__)
    for name in fencelock.__all__:
        assert getattr(fencelock, name).__doc__, name
    visible = {name for name, value in vars(fencelock).items() if not name.startswith("_")}
    modules = {name for name in visible if isinstance(getattr(fencelock, name), types.ModuleType)}
    assert visible - modules == {name for name in fencelock.__all__ if not name.startswith("_")} - modules


def test_blocking_code_needs_no_greenlet(tmp_path: Path) -> None:
    """SQLAlchemy 2.1 brings it only when asked to; locks and transactions must do without it."""
    code = f"""
import sys
sys.modules["greenlet"] = None
import fencelock
from sqlalchemy import create_engine
engine = create_engine("sqlite:///{tmp_path}/rows")
fencelock.fenced_lock("r")
fencelock.fenced_transaction(engine, "r")
try:
    fencelock.fenced_transaction("no engine", "r")
except TypeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "takes a sessionmaker, a scoped_session or an engine, not 'no engine'" in result.stdout


REDLOCK = PACKAGE / "authority" / "redlock"
#: What the simulator runs; what is proven there is what ships.
PURE = [
    *(REDLOCK / f"{room}.py" for room in ["operations"]),
    *sorted((REDLOCK / "membership").glob("*.py")),
    *sorted((REDLOCK / "protocol").glob("*.py")),
    *sorted((REDLOCK / "wire").glob("*.py")),
]
#: What a pure room is given as arguments: the time, chance and bytes.
IMPURE = {"time", "random", "secrets", "socket", "ssl", "select", "threading", "asyncio", "os"}


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_pure_rooms_know_no_clock_no_chance_and_no_socket(path: Path) -> None:
    """So threads, event loops and the simulator run the same of them."""
    imported = imports_of(path)
    assert not IMPURE & {name.partition(".")[0] for name in imported}
    above = ("transport", "redlock", "aio", "recovery", "admin")
    assert not [name for name in imported if name.startswith(tuple(f"{_REDLOCK}.{room}" for room in above))]


_REDLOCK = "fencelock.authority.redlock"


def test_each_room_of_the_lock_is_small() -> None:
    """One sitting is enough to read it."""
    rooms = [*PACKAGE.glob("lock/*.py"), *PACKAGE.glob("renewal/*.py"), *REDLOCK.rglob("*.py")]
    lines = {path: path.read_text().count("\n") for path in rooms}
    assert not {path.name: count for path, count in lines.items() if count > 400}


def test_what_moves_bytes_knows_no_authority() -> None:
    """Connections are told what they need to know of it by functions."""
    for path in (REDLOCK / "transport").glob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith(f"{_REDLOCK}.redlock")]


def test_nothing_that_locks_or_writes_imports_what_observes() -> None:
    """They tell `_events`; who listens is no concern of theirs."""
    for name, path in MODULES.items():
        if not name.startswith(("fencelock.observe", "fencelock.cli", "fencelock.commands")):
            assert not {found for found in imports_of(path) if found.startswith("fencelock.observe")}, name
