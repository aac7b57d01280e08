import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

import app
from fencelock import QuorumError
from models import Account, Session

pytestmark = pytest.mark.anyio


async def balance() -> int:
    async with Session() as session:
        return (await session.get_one(Account, 1)).balance


async def test_deposit_counts_once(client):
    for _ in range(2):
        answer = await client.post("/accounts/1/deposits?cents=50")
        assert answer.json() == {"balance": 150}
    assert (await client.post("/accounts/1/deposits?cents=60")).status_code == 422


async def test_payment_is_asked_for_once(client, monkeypatch):
    asked = []

    async def bank(key, cents):
        asked.append((key, cents))

    monkeypatch.setattr(app, "ask_the_bank", bank)
    for _ in range(2):
        assert (await client.post("/accounts/1/payments?cents=70")).json() == {"balance": 30}
    assert asked == [("1:k1", 70)]
    poor = await client.post("/accounts/1/payments?cents=70", headers={"Idempotency-Key": "k2"})
    assert poor.status_code == 402


@pytest.mark.parametrize("url", ["/accounts/1/deposits?cents=50", "/accounts/1/payments?cents=50"])
async def test_late_worker_is_refused(client, connection: AsyncConnection, stale_writer, url):
    async with stale_writer(connection, Account, 1):
        late = await client.post(url)
    assert (late.status_code, late.text, late.headers["Retry-After"]) == (409, "Conflict", "1")
    assert await balance() == 100
    assert (await client.post(url)).status_code == 200  # the next try is fresh


async def test_lost_lease_writes_nothing(client, lost_lease):
    with lost_lease("account:1"):
        assert (await client.post("/accounts/1/deposits?cents=50")).status_code == 409
    assert await balance() == 100


async def test_worker_that_slept_while_the_bank_answered(client, connection, stale_writer, monkeypatch):
    newer = stale_writer(connection, Account, 1)

    async def slow_bank(key, cents):
        await newer.__aenter__()

    monkeypatch.setattr(app, "ask_the_bank", slow_bank)
    assert (await client.post("/accounts/1/payments?cents=50")).status_code == 409
    await newer.__aexit__()
    assert await balance() == 100


async def test_other_holder_makes_it_wait(client, held_elsewhere):
    with held_elsewhere("account:1"):
        assert (await client.post("/accounts/1/deposits?cents=50")).status_code == 409  # of idempotency_key
        assert (await client.put("/accounts/1")).status_code == 423


async def test_unknown_account_is_not_found(client):
    assert (await client.post("/accounts/2/deposits?cents=50")).status_code == 404


async def test_health(client, monkeypatch):
    assert (await client.get("/health")).status_code == 200

    async def fail(_name):
        raise QuorumError("postgresql://user@db.internal does not answer")

    monkeypatch.setattr(app.app.state.locks.aio, "inspect", fail)
    ill = await client.get("/health")
    assert (ill.status_code, ill.text) == (503, "Service Unavailable")
    assert (await client.get("/alive")).status_code == 200
