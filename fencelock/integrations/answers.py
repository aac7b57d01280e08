"""The HTTP answers to errors, for any framework.

Where a framework takes handlers, give it one for each class of `ANSWERED`:

```python
# Litestar
def answer(request: Request, error: Exception) -> Response[str]:
    text, status, headers = answer_to(error, request.url.path)
    return Response(text, status_code=status, headers=headers, media_type="text/plain")

app = Litestar(routes, exception_handlers=dict.fromkeys(ANSWERED, answer))
```

```python
# Django REST framework: REST_FRAMEWORK = {"EXCEPTION_HANDLER": "shop.errors.answer"}
def answer(error: Exception, context: dict[str, Any]) -> Response | None:
    if not isinstance(error, ANSWERED):
        return exception_handler(error, context)
    text, status, headers = answer_to(error, context["request"].path)
    return Response(text, status, headers=headers)
```

For FastAPI, Starlette and Flask, `answer_errors(app)` does it.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock._outcomes import http_status, is_retryable
from fencelock.errors import FencelockError

#: The errors that `fencelock.http_status` knows, and their base classes.
ANSWERED: Final = (FencelockError, DBAPIError, NoResultFound, PoolTimeoutError, OSError)

logger: logging.Logger = logging.getLogger("fencelock.integrations")


def answer_to(error: Exception, path: str) -> tuple[str, int, dict[str, str]]:
    """Return body, status and headers, without the error's text, which may name hosts and processes.

    An error with the status 500 is raised again. The logger `fencelock.integrations` has the text of others.

    Args:
        error: one of `ANSWERED`.
        path: the path of the request, for the log.
    """
    status = http_status(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error
    note(path, status, error)
    return HTTPStatus(status).phrase, status, {"Retry-After": "1"} if is_retryable(error) else {}


def note(path: str, status: int, error: Exception) -> None:
    """Log an error that is answered with this status."""
    logger.warning("%s answered with %s: %s", path, status, error)
