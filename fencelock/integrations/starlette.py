"""Starlette, and FastAPI: answers to the errors of locks, of the guard and of the database."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from fencelock.integrations.answers import ANSWERED, answer_to


def answer_errors(app: Starlette) -> None:
    """Answer errors by `http_status`, and with `Retry-After` if a client should try again.

    ```python
    fencelock.integrations.starlette.answer_errors(app)
    ```

    The logger `fencelock.integrations` has the answered errors. One with the status 500 is raised again. A
    mounted application has its own handlers: call this for it, too.

    Raises:
        TypeError: `app` is of another framework: see `fencelock.integrations.answers`.
        RuntimeError: the application has begun to serve.
    """
    if not isinstance(app, Starlette):
        raise TypeError(
            f"answer_errors takes the application, FastAPI or Starlette, not {type(app).__name__}; for other"
            " frameworks, give answer_to() of fencelock.integrations.answers to their error handlers"
        )
    if app.middleware_stack is not None:
        raise RuntimeError("the application has begun to serve: call answer_errors where you make it")

    async def answer(request: Request, error: Exception) -> Response:
        text, status, headers = answer_to(error, request.url.path)
        return Response(text, status, headers, "text/plain")

    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)
