"""The pytest plugin works in the suite of a user."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs import python

SHOP = """
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from fencelock import FencedModel, fenced_lock

class Base(DeclarativeBase): ...

class Order(FencedModel, Base):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[bool] = mapped_column(default=False)

def pay(engine, number):
    with fenced_lock(f"order:{number}", timeout=0), Session(engine) as session:
        session.get_one(Order, number).paid = True
        session.commit()
"""
TESTS = """
import pytest
from fencelock import LockLostError, LockTimeoutError, StaleTokenError, UnfencedWriteError, fenced_lock
from shop import Base, Order, Session, pay
from sqlalchemy import create_engine

@pytest.fixture
def engine(tmp_path, unfenced):
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    Base.metadata.create_all(engine)
    with unfenced(), Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
    yield engine
    engine.dispose()

seen = []

def test_first(engine, fencelock_authority):
    pay(engine, 1)
    seen.append(fencelock_authority)

def test_second(engine, fencelock_authority, stale_writer, lost_lease, held_elsewhere):
    for situation, error in (
        (stale_writer(engine, Order, 1), StaleTokenError),
        (lost_lease("order:1"), LockLostError),
        (held_elsewhere("order:1"), LockTimeoutError),
    ):
        with situation, pytest.raises(error):
            pay(engine, 1)
    pay(engine, 1)
    seen.append(fencelock_authority)

def test_unfenced_names_its_own_block(engine):
    with Session(engine) as session, pytest.raises(UnfencedWriteError):
        session.get_one(Order, 1).paid = True
        session.commit()

def test_scope():
    assert len(set(map(id, seen))) == AUTHORITIES
"""


@pytest.mark.parametrize(("scope", "authorities"), [("function", 2), ("session", 1)])
def test_a_suite_has_its_fixtures(tmp_path: Path, scope: str, authorities: int) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TESTS.replace("AUTHORITIES", str(authorities)))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = .\nfilterwarnings = error\nfencelock_scope = {scope}\n"
    )
    assert_passes(tmp_path, "4 passed")


def test_a_wrong_scope_is_said(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text("def test_one(fencelock_authority): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfencelock_scope = forever\n")
    done = run(tmp_path)
    assert done.returncode != 0
    assert "forever" in done.stdout + done.stderr


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run pytest as a user does; the entry point is named, because the checkout may be installed without."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    if "fencelock.testing.plugin" not in installed():
        command += ["-p", "fencelock.testing.plugin"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("FENCELOCK_URL", None)
    return python(*command, cwd=folder, env=environment)


def installed() -> set[str]:
    from importlib.metadata import entry_points  # noqa: PLC0415

    return {each.value for each in entry_points(group="pytest11")}


def assert_passes(folder: Path, says: str) -> None:
    done = run(folder)
    assert says in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
