"""Accounts that several workers change: FastAPI and asyncpg."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Response
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from sqlalchemy.ext.asyncio import AsyncSession

from fencelock import claim, configure, fenced_lock, fenced_once, fenced_transaction
from fencelock.integrations.fastapi import answer_errors, idempotency_key
from fencelock.observe import prometheus
from models import TTL, Account, Payment, Session, make_engine

logger = logging.getLogger(__name__)
prometheus.instrument()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    engine = make_engine()
    Session.configure(bind=engine)
    app.state.locks = configure(engine)  # the authority, also if FENCELOCK_URL names another one
    yield
    await app.state.locks.aio.close()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
answer_errors(app)


@app.get("/alive")  # asks nothing, because a new process mends no database
async def alive() -> str:
    return "yes"


@app.get("/health")  # two short SELECTs; 503 where no lock can be granted
async def health() -> str:
    await app.state.locks.aio.inspect("health")
    return "locks are granted"


@app.get("/metrics")  # of all workers, which share the folder PROMETHEUS_MULTIPROC_DIR
def metrics() -> Response:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return Response(generate_latest(registry), media_type="text/plain")


async def transaction(number: int) -> AsyncIterator[AsyncSession]:
    async with fenced_transaction(Session, f"account:{number}", ttl=TTL, timeout=2) as session:
        yield session


# "function" commits before the answer is sent, and not after it. It needs FastAPI 0.121 or later.
Locked = Annotated[AsyncSession, Depends(transaction, scope="function")]
Key = Annotated[str, Depends(idempotency_key)]


@app.put("/accounts/{number}", status_code=204)
async def open_account(number: int, session: Locked) -> None:
    if await session.get(Account, number) is None:
        session.add(Account(id=number))


# Where clients are users, put the user into the key: "deposit:{user}:{key}".
@fenced_once("deposit:{number}:{key}", "account:{number}", ttl=TTL, timeout=2)
async def add_money(session: AsyncSession, number: int, key: str, cents: int) -> dict[str, int]:
    account = await session.get_one(Account, number)
    account.balance += cents
    return {"balance": account.balance}


@app.post("/accounts/{number}/deposits")
async def deposit(number: int, cents: int, key: Key) -> dict[str, int]:
    return await add_money(Session, number, key, cents)


async def ask_the_bank(key: str, cents: int) -> None:
    """Stand for a bank, which takes its time, and pays a key once, however often it is asked."""
    logger.info("pay %s cents for %s", cents, key)
    await asyncio.sleep(float(os.environ.get("BANK_SECONDS", "0")))


@app.post("/accounts/{number}/payments")
async def pay(number: int, cents: int, key: Key) -> dict[str, int]:
    async with fenced_lock(f"account:{number}", ttl=TTL, timeout=2), Session() as session:
        account = await claim(session, Account, number)  # refuses older holders from here on
        paid = await session.get(Payment, (number, key))
        if paid is not None and paid.cents != cents:
            raise HTTPException(422)
        if paid is None and account.balance < cents:
            raise HTTPException(402)
        await session.commit()  # no transaction is open while the bank answers
        if paid is None:
            await ask_the_bank(f"{number}:{key}", cents)
            account.balance -= cents
            await session.flush()  # the account first: it has a fence, and a new payment has none
            session.add(Payment(account_id=number, key=key, cents=cents))
            await session.commit()
        return {"balance": account.balance}
