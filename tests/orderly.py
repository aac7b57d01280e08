"""Applications that hold a lock, in each way that `test_orderly_ends` asks for; started by real servers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from celery import Celery  # type: ignore[import-untyped]
from fastapi import FastAPI
from flask import Flask
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fencelock import Term, configure, fenced_lock, leader

AUTHORITY, NAME, SECONDS = os.environ["AUTHORITY"], os.environ["NAME"], float(os.environ["SECONDS"])
WAY, CLOSES = os.environ["WAY"], bool(os.environ.get("CLOSES"))


def say() -> None:
    """Tell the test that the lock is held."""
    Path(os.environ["SAID"]).touch()


async def reign(term: Term) -> None:
    say()
    while await term.wait_async(0.2):
        pass


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.engine = create_async_engine("sqlite+aiosqlite://")
    locks = configure(AUTHORITY)
    reigning = [asyncio.ensure_future(leader(NAME, ttl=60).run(reign))] if WAY == "leader" else []
    yield
    if CLOSES:
        for task in reigning:
            task.cancel()
        await locks.aio.close()
        await app.state.engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.get("/")
async def is_ready() -> str:
    return "ready"


@app.post("/leader")
@app.post("/async")
async def hold() -> None:
    if WAY != "leader":
        async with fenced_lock(NAME, ttl=60):
            say()
            await asyncio.sleep(SECONDS)


@app.post("/session")
async def hold_around_a_session() -> None:
    async with fenced_lock(NAME, ttl=60), AsyncSession(app.state.engine) as session:
        await session.execute(text("SELECT 1"))
        say()
        await asyncio.sleep(SECONDS)


@app.post("/def")
def hold_in_a_thread() -> None:
    with fenced_lock(NAME, ttl=60):
        say()
        time.sleep(SECONDS)


site = Flask(__name__)
site.get("/")(lambda: "ready")


@site.post("/def")
def hold_in_a_site() -> str:
    configure(AUTHORITY)
    hold_in_a_thread()
    return ""


queue = Celery("orderly", broker=os.environ.get("BROKER"))
queue.conf.broker_connection_retry_on_startup = True


@queue.task  # type: ignore[untyped-decorator]
def hold_in_a_task() -> None:
    hold_in_a_site()
