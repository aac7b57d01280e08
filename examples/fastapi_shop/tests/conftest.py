"""A client of the app. Each test is inside one transaction, which is rolled back at its end."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from app import app
from fencelock import Database
from models import Account, Session, create_tables, make_engine


@pytest.fixture(scope="session", autouse=True)
def tables() -> None:
    asyncio.run(create_tables())


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the plugin of anyio, which comes with FastAPI, runs the coroutines


@pytest.fixture
async def connection(anyio_backend: str, unfenced: None) -> AsyncIterator[AsyncConnection]:
    engine = make_engine()
    async with engine.connect() as connection:
        outer = await connection.begin()
        Session.configure(bind=connection, join_transaction_mode="create_savepoint")
        async with Session() as session:
            with unfenced():
                session.add(Account(id=1, balance=100))
                await session.commit()
        yield connection
        await outer.rollback()
    await engine.dispose()


@pytest.fixture
async def client(
    connection: AsyncConnection, fencelock_authority: Database
) -> AsyncIterator[httpx.AsyncClient]:
    app.state.locks = fencelock_authority  # the lifespan does not run here
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Idempotency-Key": "k1"}
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", headers=headers) as client:
        yield client
