"""Each room of the library knows only the rooms that it may know."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from pathlib import Path

import fencelock
from tests.programs import printed

PACKAGE = Path(fencelock.__file__).parent


def imports_of(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Return the full names of what a module imports, wherever in it, also by `import_module`.

    What only a type checker imports does not count `at_run_time`.
    """
    names = set()
    tree = ast.parse(path.read_text())
    if at_run_time:
        for each in ast.walk(tree):
            if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING":
                each.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.relative_to(PACKAGE.parent).parts[: -node.level] if node.level else ()
            within = ".".join([*folder, *([node.module] if node.module else [])])
            names |= {f"{within}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
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
    return set(printed("-c", code).split())


def modules_in(folder: Path) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
    }


MODULES = modules_in(PACKAGE)
BESIDE = {name: modules_in(PACKAGE.parent / name) for name in ("benchmarks", "proof")}
"""The packages that are not in the wheel, without the tests of their tools."""
BESIDE["proof"] = {name: path for name, path in BESIDE["proof"].items() if ".tests" not in name}

VALUES = (
    "_backoff _checks _databases _engines _events _generators _owners _process _threads _workers "
    "authority.hosts errors holder lease tokens"
)
REDLOCK = "authority.redlock"
ARROWS = {
    # room: the rooms that it may know, imports for types and imports in functions included
    "values": "",
    "authority.base": "values",
    "lock": "values authority.base",
    "authority.generators": "values authority.base",
    "authority.loops": "values authority.base authority.generators",
    "authority.database": "values authority.base authority.loops",
    "authority.line": "values authority.base authority.loops",
    "authority.etcd": "values authority.base authority.line authority.loops",
    "authority.zookeeper": "values authority.base authority.line authority.loops",
    f"{REDLOCK}.protocol": "values authority.base",
    f"{REDLOCK}.membership": f"values {REDLOCK}.protocol",
    f"{REDLOCK}.wire": f"values {REDLOCK}.protocol {REDLOCK}.membership",
    f"{REDLOCK}.transport": f"values {REDLOCK}.protocol {REDLOCK}.membership {REDLOCK}.wire",
    REDLOCK: f"values authority.base authority.generators {REDLOCK}.protocol {REDLOCK}.membership "
    f"{REDLOCK}.wire {REDLOCK}.transport",
    "_locking": "values authority.base authority.database lock",
    "_fenced": "values lock _locking",
    "guard": "values",
    "max_fence": "guard",
    "transaction": "values guard lock _locking",
    "_fenced_once": "values _fenced _locking guard lock transaction",
    "_outcomes": "values",
    "integrations": "values _outcomes",
    "_leader": "values authority.base _locking",
    "alembic": "values guard authority.database",
    "observe": f"values {REDLOCK}",
    "stores": "values",
    "testing": "values _locking authority.database guard lock",
    "cli": f"values _locking authority.database authority.line {REDLOCK} {REDLOCK}.transport guard lock "
    "max_fence observe",
    "__main__": "cli",
    "": f"values _locking _outcomes _fenced_once authority.database authority.etcd authority.zookeeper "
    f"{REDLOCK} guard _leader lock _fenced transaction",
}
"""The house from the ground up: a room knows only rooms above its line."""

FOR_TYPES = {
    "authority.generators": {"lock"},
    "_locking": {"authority.line", REDLOCK, f"{REDLOCK}.transport"},
}
"""The arrows that only a type checker follows: `lock()` returns a lock, `configure()` an authority."""

STOREYS_OF_GUARD = (
    "_sqlalchemy",
    "exact events tables",
    "sessions trigger_sql",
    "conditions leases",
    "refused",
    "routing lists objects text triggers",
    "verdict",
    "statements",
    "_install",
    "model sql",
    "_fenced_text _claim _gate receipts",
    "_upsert",
)
"""The rooms of the guard from the ground up: each one knows only rooms below it."""

#: Longest room first, so that a module is of the narrowest room that has it.
ROOMS = {**dict.fromkeys(VALUES.split(), "values"), **{room: room for room in ARROWS}}
PREFIXES = sorted(ROOMS, key=len, reverse=True)


def room_of(module: str) -> str:
    name = module.removeprefix("fencelock").removeprefix(".")
    return ROOMS[next(prefix for prefix in PREFIXES if f"{name}.".startswith(f"{prefix}.") or not prefix)]


def known_to(module: str, modules: Mapping[str, Path] = MODULES, *, at_run_time: bool = False) -> set[str]:
    """Return those of the modules that a module imports, anywhere and for any purpose."""
    names = imports_of(modules[module], at_run_time=at_run_time)
    found = {name if name in modules else name.rpartition(".")[0] for name in names}
    return (found & modules.keys()) - {module}


def circles_in(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules that are left when all that know nothing of the rest are taken away."""
    left = {module: known_to(module, modules) for module in modules}
    while ends := {module for module, known in left.items() if not known & left.keys()}:
        left = {module: known for module, known in left.items() if module not in ends}
    return left


def test_every_arrow_is_in_the_table_and_every_arrow_of_the_table_is_there() -> None:
    """The halves meet in `transaction`; what observes is known to none that locks or writes."""
    for at_run_time in (True, False):
        arrows: dict[str, set[str]] = {room: set() for room in ARROWS}
        for module in MODULES:
            known = known_to(module, at_run_time=at_run_time) - {"fencelock"}
            arrows[room_of(module)] |= set(map(room_of, known))
        for_types = {} if at_run_time else FOR_TYPES
        found = {room: arrows[room] - {room} - for_types.get(room, set()) for room in ARROWS}
        assert found == {room: set(known.split()) for room, known in ARROWS.items()}


def test_no_arrow_runs_up() -> None:
    """Each room knows only rooms that stand before it in the table."""
    floor = {room: number for number, room in enumerate(ARROWS)}
    ups = {(room, known) for room in ARROWS for known in ARROWS[room].split() if floor[known] >= floor[room]}
    assert ups == set()


def test_no_circle() -> None:
    """Neither in the library, nor in proof/ and benchmarks/ together."""
    assert circles_in(MODULES) == {}
    assert circles_in({**BESIDE["benchmarks"], **BESIDE["proof"]}) == {}


def test_proofs_know_no_benchmark_and_the_library_knows_neither() -> None:
    """A benchmark may use the servers of the proofs."""
    for modules, others in ((BESIDE["proof"], {"benchmarks"}), (MODULES, {"benchmarks", "proof"})):
        for module, path in modules.items():
            assert not {name.partition(".")[0] for name in imports_of(path)} & others, module


def test_rooms_of_the_guard_know_only_rooms_below_them() -> None:
    """A new room is added to the table."""
    storey = {room: number for number, rooms in enumerate(STOREYS_OF_GUARD) for room in rooms.split()}
    for module in MODULES:
        if module.startswith("fencelock.guard."):
            room = module.removeprefix("fencelock.guard.")
            below = {known.removeprefix("fencelock.guard.") for known in known_to(module)} & storey.keys()
            assert not {known for known in below if storey[known] >= storey[room]}, room


def test_files_are_short() -> None:
    """One sitting is enough to read one."""
    lines = {module: path.read_text().count("\n") for module, path in MODULES.items()}
    assert {module for module, count in lines.items() if count > 500} == set()


#: The simulator runs these, and a pure room gets the time, chance and bytes as arguments.
PURE = [
    module
    for module in MODULES
    if module.startswith(tuple(f"fencelock.{REDLOCK}.{room}" for room in ("membership", "protocol", "wire")))
    or module in {"fencelock.authority.etcd.channel", "fencelock.authority.etcd.messages"}
]
IMPURE = {"time", "random", "secrets", "socket", "ssl", "select", "threading", "asyncio", "os"}


def test_pure_rooms_know_no_clock_no_chance_and_no_socket() -> None:
    """So threads, event loops and the simulator run the same code."""
    imported = {module: {name.partition(".")[0] for name in imports_of(MODULES[module])} for module in PURE}
    assert {module: IMPURE & names for module, names in imported.items() if IMPURE & names} == {}


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


def test_public_names_are_listed_and_documented() -> None:
    """`fencelock.__all__` lists all that is visible, and each name in it says what it promises."""
    assert {"FencedLock", "Lease", "Redlock", "configure", "fenced_lock"} <= set(fencelock.__all__)
    for name in fencelock.__all__:
        assert getattr(fencelock, name).__doc__, name
    visible = {name for name in vars(fencelock) if not name.startswith("_")} | {"Redlock"}  # loaded when used
    modules = {name for name in visible if isinstance(getattr(fencelock, name), types.ModuleType)}
    assert (
        visible - modules - {"Etcd", "ZooKeeper"}
        == {name for name in fencelock.__all__ if not name.startswith("_")} - modules
    )


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
    assert "takes a sessionmaker, a scoped_session or an engine, not 'no engine'" in printed("-c", code)
