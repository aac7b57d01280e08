import pytest
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

import tasks
from fencelock import LockLostError, LockTimeoutError, StaleTokenError
from tasks import Order, Report


@pytest.fixture(autouse=True)
def engine(tmp_path, unfenced, monkeypatch):
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setattr(tasks, "engine", engine)
    tasks.Base.metadata.create_all(engine)
    with unfenced(), Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
    yield engine
    engine.dispose()


def test_ships_once(monkeypatch):
    asked = []
    monkeypatch.setattr(tasks, "carrier", lambda key: asked.append(key) or "a parcel")
    assert [tasks.ship(1), tasks.ship(1)] == ["a parcel", "a parcel"]  # called directly, nothing is retried
    assert asked == ["ship order 1"]


def test_late_worker_is_refused(engine, stale_writer):
    with stale_writer(engine, Order, 1), pytest.raises(StaleTokenError):
        tasks.ship(1)


def test_lost_lease_writes_nothing(lost_lease):
    with lost_lease("order:1"), pytest.raises(LockLostError):
        tasks.ship(1)


def test_other_holder_makes_it_try_later(held_elsewhere):
    with held_elsewhere("order:1"), pytest.raises(LockTimeoutError):
        tasks.ship(1)


def test_all_these_are_tried_again():
    assert {StaleTokenError, LockLostError, LockTimeoutError} <= {*tasks.ship.autoretry_for}


def test_one_report_for_each_slot(engine):
    for slot in ("10:00", "10:00", "10:01"):
        assert tasks.report(slot) == 0
    with Session(engine) as session:
        assert session.scalar(select(func.count(Report.id))) == 2
