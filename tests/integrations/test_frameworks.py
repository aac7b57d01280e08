"""`answer_errors` works with frameworks that handle errors in their own way, or says what to write."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from flask import Blueprint, Flask, Response
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from fencelock import StaleTokenError
from fencelock.integrations import fastapi, flask, starlette
from fencelock.integrations.answers import ANSWERED, answer_to
from tests.programs import printed

#: Status, `Retry-After` and body of a path.
Answers = Callable[[str], tuple[int, str | None, str]]
STALE, HIDDEN = StaleTokenError("orders", (1,), 7, 8), KeyError("a bug")


def fail(*_: object) -> Any:
    raise STALE


def break_down(*_: object) -> Any:
    raise HIDDEN


def plain(app: Flask) -> None:
    app.add_url_rule("/fail", view_func=fail)
    app.add_url_rule("/break", view_func=break_down)


def resources(package: str) -> Callable[[Flask], None]:
    """Return a function that adds an Api of Flask-RESTX or Flask-RESTful."""

    def add(app: Flask) -> None:
        module = import_module(package)
        api = module.Api(app)
        for name, view in (("fail", fail), ("break", break_down)):
            api.add_resource(type(name, (module.Resource,), {"get": view}), f"/{name}")

    return add


def on_a_blueprint(app: Flask) -> None:
    module = import_module("flask_restx")
    blueprint = Blueprint("api", __name__)
    api = module.Api(blueprint)
    for name, view in (("fail", fail), ("break", break_down)):
        api.add_resource(type(name, (module.Resource,), {"get": view}), f"/{name}")
    app.register_blueprint(blueprint)


def smorest(app: Flask) -> None:
    module = import_module("flask_smorest")
    app.config.update(API_TITLE="shop", API_VERSION="v1", OPENAPI_VERSION="3.0.2")
    blueprint = module.Blueprint("shop", "shop")
    blueprint.route("/fail")(fail)
    blueprint.route("/break")(break_down)
    module.Api(app).register_blueprint(blueprint)


def of_flask(app: Flask) -> Answers:
    app.config["PROPAGATE_EXCEPTIONS"] = False

    def ask(path: str) -> tuple[int, str | None, str]:
        answer: Any = app.test_client().get(path)
        return answer.status_code, answer.headers.get("Retry-After"), answer.text

    return ask


def of_asgi(app: Any) -> Answers:
    client = TestClient(app, raise_server_exceptions=False)

    def ask(path: str) -> tuple[int, str | None, str]:
        answer: Any = client.get(path)
        return answer.status_code, answer.headers.get("Retry-After"), answer.text

    return ask


def check(ask: Answers) -> None:
    """The error of a lock is answered and says nothing; another error stays what it was."""
    assert ask("/fail") == (409, "1", "Conflict")
    status, retry, _ = ask("/break")
    assert (status, retry) == (500, None)


FLASK: dict[str, Callable[[Flask], None]] = {
    "flask": plain,
    "flask_restx": resources("flask_restx"),
    "flask_restx on a blueprint": on_a_blueprint,
    "flask_restful": resources("flask_restful"),
    "flask_smorest": smorest,
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", FLASK)
def test_extensions_of_flask(name: str, *, first: bool) -> None:
    pytest.importorskip(name.split(maxsplit=1)[0])
    app = Flask("shop")
    steps = [flask.answer_errors, FLASK[name]]
    for step in steps if first else reversed(steps):
        step(app)
    check(of_flask(app))


@pytest.mark.parametrize("name", ["flask_restx", "flask_restful"])
def test_extensions_of_flask_answer_with_500_without_it(name: str) -> None:
    """The control."""
    pytest.importorskip(name)
    app = Flask("shop")
    FLASK[name](app)
    app.register_error_handler(StaleTokenError, lambda _error: Response("409", 409))
    assert of_flask(app)("/fail")[0] == 500


def test_handlers_of_the_program_come_first() -> None:
    pytest.importorskip("flask_restx")
    app = Flask("shop")
    flask.answer_errors(app)
    FLASK["flask_restx"](app)
    app.register_error_handler(StaleTokenError, lambda _error: Response("mine", 418))
    assert of_flask(app)("/fail")[0] == 418


def test_apiflask() -> None:
    app = pytest.importorskip("apiflask").APIFlask("shop")
    flask.answer_errors(app)
    plain(app)
    check(of_flask(app))


def test_starlette() -> None:
    routes = [Route("/fail", fail), Route("/break", break_down)]
    inner = Starlette(routes=routes)
    app = Starlette(routes=[*routes, Mount("/inner", app=inner)])
    starlette.answer_errors(app)
    starlette.answer_errors(inner)
    check(of_asgi(app))
    assert of_asgi(app)("/inner/fail")[0] == 409
    with pytest.raises(RuntimeError, match="has begun to serve"):
        starlette.answer_errors(app)


def test_fastapi() -> None:
    app = FastAPI()
    app.get("/fail")(lambda: fail())  # noqa: PLW0108 - FastAPI takes parameters for those of a query
    app.get("/break")(lambda: break_down())  # noqa: PLW0108
    fastapi.answer_errors(app)
    check(of_asgi(app))


def test_litestar() -> None:
    litestar = pytest.importorskip("litestar")

    def answer(request: Any, error: Exception) -> Any:
        text, status, headers = answer_to(error, request.url.path)
        return litestar.Response(text, status_code=status, headers=headers, media_type="text/plain")

    def failing() -> None:
        fail()

    def breaking() -> None:
        break_down()

    views = {"/fail": failing, "/break": breaking}
    routes = [litestar.get(path, sync_to_thread=False)(view) for path, view in views.items()]
    app = litestar.Litestar(routes, exception_handlers=dict.fromkeys(ANSWERED, answer))
    check(of_asgi(app))
    with pytest.raises(TypeError, match="not Litestar; for other frameworks, give answer_to"):
        starlette.answer_errors(app)


DJANGO = """
import django
from django.conf import settings
from django.test import RequestFactory

from fencelock import StaleTokenError
from fencelock.integrations.answers import ANSWERED, answer_to

settings.configure(REST_FRAMEWORK={"EXCEPTION_HANDLER": "__main__.answer", "UNAUTHENTICATED_USER": None})
django.setup()
from rest_framework.response import Response
from rest_framework.views import APIView, exception_handler


def answer(error, context):
    if not isinstance(error, ANSWERED):
        return exception_handler(error, context)
    text, status, headers = answer_to(error, context["request"].path)
    return Response(text, status, headers=headers)


class Fail(APIView):
    def get(self, request):
        raise StaleTokenError("orders", (1,), 7, 8)


answered = Fail.as_view()(RequestFactory().get("/fail"))
print(answered.status_code, answered.headers["Retry-After"], answered.data)
"""


def test_django_rest_framework() -> None:
    pytest.importorskip("rest_framework")
    assert printed("-c", DJANGO) == "409 1 Conflict\n"


def test_what_is_no_application() -> None:
    for given in (APIRouter(), Flask("shop"), fail):
        with pytest.raises(TypeError, match="answer_errors takes the application"):
            starlette.answer_errors(given)  # type: ignore[arg-type]
    restx = pytest.importorskip("flask_restx")
    with pytest.raises(TypeError, match="takes the Flask application, not Api"):
        flask.answer_errors(restx.Api(Flask("shop")))
