"""The header `Idempotency-Key` in FastAPI gets 400, 409 or 422, or the stored answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from fencelock import Database, fenced_once, once
from fencelock.integrations.fastapi import idempotency_key
from tests.jobs.accounts import Account, prepare

Key = Annotated[str, Depends(idempotency_key)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0.2})
    yield prepare(made, balance=0)
    made.dispose()


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[Database]:
    with Database(f"sqlite:///{tmp_path / 'shop.db'}") as made:
        yield made


@pytest.fixture
def app(engine: Engine, locks: Database) -> FastAPI:
    made = FastAPI()

    @fenced_once("deposit:{key}", "account:1", timeout=0.1, authority=locks)
    def add(session: Session, key: str, cents: int) -> dict[str, int]:  # noqa: ARG001
        account = session.get_one(Account, 1)
        account.balance += cents
        return {"balance": account.balance}

    @made.post("/deposits")
    def deposit(cents: int, key: Key) -> dict[str, int]:
        return add(engine, key, cents)

    @made.post("/plain")
    def plain(key: Key) -> bool:
        with Session(engine) as session, session.begin():
            return once(session, key).done

    return made


def ask(app: FastAPI, path: str, *keys: str | None) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            headers = [("Idempotency-Key", key) for key in keys if key is not None]
            return await client.post(path, headers=headers)

    return asyncio.run(main())


def post(app: FastAPI, cents: int, key: str | None) -> tuple[int, object]:
    answer = ask(app, f"/deposits?cents={cents}", key)
    return answer.status_code, answer.json()


def test_repeated_request_gets_the_first_answer(app: FastAPI) -> None:
    assert post(app, 500, "a7") == (200, {"balance": 500})
    assert post(app, 1, "b8") == (200, {"balance": 501})
    assert post(app, 500, "a7") == (200, {"balance": 500})
    assert post(app, 500, '"a7"') == (200, {"balance": 500}), "in quotes, as the draft has it"


@pytest.mark.parametrize("key", [None, "", '""', "k" * 201])
def test_request_without_a_usable_key_is_refused(app: FastAPI, key: str | None) -> None:
    status, answer = post(app, 500, key)
    assert status == 400
    assert "Idempotency-Key" in str(answer)


def test_another_request_with_the_key_is_refused(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    post(app, 500, "a7")
    assert post(app, 600, "a7") == (422, {"detail": "this Idempotency-Key was used for another request"})
    assert "/deposits answered with 422: the receipt" in caplog.text


def test_request_that_is_under_way(app: FastAPI, locks: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The lock is held for longer than its timeout. The log names the holder, the answer does not."""
    with locks.lock("account:1"), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, app, "/deposits?cents=1", "a7").result(60)
    assert (answer.status_code, answer.headers["Retry-After"]) == (409, "1")
    assert "/deposits answered with 409: 'account:1'" in caplog.text
    assert "account:1" not in answer.text
    assert post(app, 1, "a7") == (200, {"balance": 1})


def test_transaction_that_is_open(app: FastAPI, engine: Engine) -> None:
    with Session(engine) as session, ThreadPoolExecutor(1) as pool:
        once(session, "a7")
        assert pool.submit(ask, app, "/plain", "a7").result(60).status_code == 409
        session.rollback()
    assert ask(app, "/plain", "a7").json() is False
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM fencelock_receipts")) == 1


def test_two_different_keys_are_refused(app: FastAPI) -> None:
    assert ask(app, "/plain", "a", "b").status_code == 400
    assert ask(app, "/plain", "a", "a").status_code == 200
