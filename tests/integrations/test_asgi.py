"""The tokens of a caller count in its request, and nowhere else."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import BackgroundTasks, FastAPI, Request
from fastapi.responses import JSONResponse
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError
from fencelock.integrations import header
from fencelock.integrations.asgi import FencingTokenMiddleware
from fencelock.integrations.httpx import send_tokens, send_tokens_async
from fencelock.lease import held_leases, holding
from tests.loops import in_loop


class Base(DeclarativeBase): ...


class Item(FencedModel, Base):
    __tablename__ = "items"
    __fence_resource__ = "item:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    holder: Mapped[str]


class Gates:
    """Holds requests up, and keeps what tasks see that outlive theirs."""

    def __init__(self) -> None:
        self.inside = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()
        self.tasks: list[asyncio.Task[dict[str, str]]] = []
        self.afterwards: list[dict[str, str]] = []


async def held_later(gates: Gates) -> dict[str, str]:
    await gates.go_on.wait()
    return header.held()


def application(engine: Engine, gates: Gates) -> FencingTokenMiddleware:
    app = FastAPI()

    @app.exception_handler(StaleTokenError)
    async def refuse(_: Request, error: StaleTokenError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.exception_handler(UnfencedWriteError)
    async def complain(_: Request, error: UnfencedWriteError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 500)

    @app.put("/items/{number}")
    def put(number: int, holder: str) -> None:  # in a thread
        with Session(engine) as session:
            session.merge(Item(id=number, holder=holder))
            session.commit()

    @app.get("/held")
    async def held() -> dict[str, str]:
        return header.held()

    @app.get("/slow")
    async def slow() -> dict[str, str]:
        gates.inside.release()
        return await held_later(gates)

    @app.get("/behind")
    async def behind(tasks: BackgroundTasks) -> None:
        tasks.add_task(lambda: gates.afterwards.append(header.held()))
        gates.tasks.append(asyncio.create_task(held_later(gates)))

    return FencingTokenMiddleware(app)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'items.db'}")
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    hooks = {"request": [send_tokens_async]}
    async with httpx.AsyncClient(transport=transport, base_url="http://b", event_hooks=hooks) as client:
        yield client


@in_loop
async def test_a_late_call_is_refused(engine: Engine) -> None:
    async with client_of(application(engine, Gates())) as client:
        for token, status in ((5, 200), (5, 200), (7, 200), (6, 409), (7, 200)):
            with holding([Lease("item:1", token)]):
                answer = await client.put("/items/1", params={"holder": f"of {token}"})
            assert answer.status_code == status, answer.text
        answer = await client.put("/items/1", params={"holder": "of none"})
        assert (answer.status_code, "no lease is held" in answer.text) == (500, True)
    with Session(engine) as session:
        assert session.get_one(Item, 1).holder == "of 7"


@in_loop
async def test_each_request_has_its_own(engine: Engine) -> None:
    gates = Gates()
    app = application(engine, gates)

    async def call(number: int) -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://b") as client:
            headers = {"Fencing-Token": f"item:{number}=1"} if number else {}
            return (await client.get("/slow", headers=headers)).json()

    calls = [asyncio.create_task(call(number)) for number in range(21)]
    for _ in calls:
        await gates.inside.acquire()
    gates.go_on.set()
    answers = await asyncio.gather(*calls)
    assert answers == [{}] + [{"Fencing-Token": f"item:{number}=1"} for number in range(1, 21)]
    async with client_of(app) as client:
        await client.get("/held", headers={"Fencing-Token": "item:1=1"})
        assert held_leases() == ()
        assert (await client.get("/held")).json() == {}


@in_loop
async def test_what_a_request_starts_keeps_its_tokens(engine: Engine) -> None:
    gates = Gates()
    async with client_of(application(engine, gates)) as client:
        await client.get("/behind", headers={"Fencing-Token": "item:1=1"})
        assert held_leases() == ()
        gates.go_on.set()
        assert await gates.tasks[0] == {"Fencing-Token": "item:1=1"}
        assert gates.afterwards == [{"Fencing-Token": "item:1=1"}]
        await client.get("/behind")
        assert await gates.tasks[1] == {}


@pytest.mark.parametrize(
    "texts", [["item:1"], ["item:1=0"], ["item:1=1", "item:1=2"], [b"\xff=1"], ["a" * 9000]]
)
@in_loop
async def test_a_broken_header_is_answered_with_400(engine: Engine, texts: list[Any]) -> None:
    async with client_of(application(engine, Gates())) as client:
        answer = await client.get("/held", headers=[("Fencing-Token", text) for text in texts])
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert "oken" in answer.text


@in_loop
async def test_two_headers_are_one(engine: Engine) -> None:
    """A proxy may have split them."""
    async with client_of(application(engine, Gates())) as client:
        answer = await client.get("/held", headers=[("fencing-token", "a=1"), ("FENCING-TOKEN", "b=2")])
        assert answer.json() == {"Fencing-Token": "a=1;b=2"}


@in_loop
async def test_other_scopes_pass() -> None:
    seen = []

    async def app(scope: Any, *_: Any) -> None:
        seen.append((scope["type"], header.held()))

    middleware = FencingTokenMiddleware(app)
    await middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    headers = [(b"fencing-token", b"a=1")]
    await middleware({"type": "websocket", "headers": headers}, None, None)  # type: ignore[arg-type]
    assert seen == [("lifespan", {}), ("websocket", {})]


@in_loop
async def test_a_request_that_is_thrown_away_leaves_nothing() -> None:
    """Its coroutine is closed in another context than it began in."""

    async def app(*_: Any) -> None:
        await asyncio.sleep(0)

    scope = {"type": "http", "headers": [(b"fencing-token", b"a=1")]}
    request = FencingTokenMiddleware(app)(scope, None, None)  # type: ignore[arg-type]
    contextvars.copy_context().run(request.send, None)
    request.close()
    assert held_leases() == ()


def test_a_blocking_client_sends_them_too() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200)

    hooks = {"request": [send_tokens]}
    with httpx.Client(transport=httpx.MockTransport(answer), event_hooks=hooks) as client:
        client.get("http://b/")
        with holding([Lease("order:é", 7)]):
            client.get("http://b/", headers={"fencing-token": "order:1=1"})
    assert [request.headers.get_list("fencing-token") for request in requests] == [[], ["order:%C3%A9=7"]]


def test_a_redirect_to_another_host_gets_no_tokens() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers.get("Fencing-Token")))
        to = {"/a": "/b", "/b": "http://other/c", "/c": "http://own/d"}.get(request.url.path)
        return httpx.Response(200) if to is None else httpx.Response(302, headers={"Location": to})

    hooks = {"request": [send_tokens]}
    with (
        holding([Lease("order:1", 5)]),
        httpx.Client(
            transport=httpx.MockTransport(answer), event_hooks=hooks, follow_redirects=True
        ) as client,
    ):
        client.get("http://own/a")
    assert [url[-1] for url, token in seen if token == "order:1=5"] == ["a", "b", "d"]
    assert ("http://other/c", None) in seen
