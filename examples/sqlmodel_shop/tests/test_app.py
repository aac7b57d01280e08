import pytest
from fastapi.testclient import TestClient
from sqlmodel import SQLModel, create_engine

import app
from app import Order


@pytest.fixture
def engine(tmp_path, monkeypatch):
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setattr(app, "engine", engine)
    SQLModel.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def client(engine):
    with TestClient(app.app) as client:
        assert client.post("/orders", json={}).json() == {"id": 1, "status": "new"}
        yield client


PAID = {"status": "paid"}


def test_answers_have_no_fence(client):
    assert client.patch("/orders/1", json=PAID).json() == {"id": 1, "status": "paid"}
    assert "fencing" not in client.get("/openapi.json").text


def test_request_brings_no_fence(client):
    sent = PAID | {"id": 7, "last_fencing_token": 2**50, "last_write_id": 1}
    assert client.post("/orders", json=sent).json() == {"id": 2, "status": "paid"}
    assert client.patch("/orders/2", json=sent).json() == {"id": 2, "status": "paid"}


def test_late_worker_is_refused(client, engine, stale_writer):
    with stale_writer(engine, Order, 1):
        assert client.patch("/orders/1", json=PAID).status_code == 409
    assert client.patch("/orders/1", json=PAID).status_code == 200


def test_lost_lease_writes_nothing(client, lost_lease):
    with lost_lease("order:1"):
        assert client.patch("/orders/1", json=PAID).status_code == 409


def test_other_holder_makes_it_wait(client, held_elsewhere):
    with held_elsewhere("order:1"):
        assert client.patch("/orders/1", json=PAID).status_code == 423
    assert client.patch("/orders/2", json=PAID).status_code == 404
