"""Flask: answers to the errors of locks, of the guard and of the database."""

from __future__ import annotations

from flask import Flask, Response, request

from fencelock.integrations._answers import ANSWERED, answer_to


def answer_errors(app: Flask) -> None:
    """Answer errors by `http_status`, and with `Retry-After` if a client should try again.

    ```python
    from flask import Flask

    site = Flask("shop")
    fencelock.integrations.flask.answer_errors(site)
    ```

    The logger `fencelock.integrations` has the answered errors. One with the status 500 is raised again.
    """

    def answer(error: Exception) -> Response:
        text, status, headers = answer_to(error, request.path)
        return Response(text, status, headers, mimetype="text/plain")

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)
