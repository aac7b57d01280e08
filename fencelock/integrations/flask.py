"""Flask: answers to the errors of locks, of the guard and of the database."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request

from fencelock.integrations.answers import ANSWERED, answer_to


def answer_errors(app: Flask) -> None:
    """Answer errors by `http_status`, and with `Retry-After` if a client should try again.

    ```python
    from flask import Flask

    site = Flask("shop")
    fencelock.integrations.flask.answer_errors(site)
    ```

    The logger `fencelock.integrations` has the answered errors. One with the status 500 is raised again.
    Flask-RESTX and Flask-RESTful take no errors of these classes then, also if their `Api` comes later.

    Raises:
        TypeError: `app` is no Flask application, for example an `Api`.
    """
    if not isinstance(app, Flask):
        raise TypeError(
            f"answer_errors takes the Flask application, not {type(app).__name__}; for other frameworks, give"
            " answer_to() of fencelock.integrations.answers to their error handlers"
        )

    def answer(error: Exception) -> Response:
        text, status, headers = answer_to(error, request.path)
        return Response(text, status, headers, mimetype="text/plain")

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)
    dispatch = app.dispatch_request

    def dispatch_request(*args: Any) -> Any:
        try:
            return dispatch(*args)
        except ANSWERED as error:
            if "handle_user_exception" not in vars(app):
                raise
            # An extension has replaced this method, and would answer with 500.
            handle: Any = type(app).handle_user_exception
            return handle(app, *args, error)  # a later Flask gives a context

    setattr(app, "dispatch_request", dispatch_request)  # noqa: B010  mypy refuses an assignment
