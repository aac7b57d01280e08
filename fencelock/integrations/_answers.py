"""The HTTP answers to errors, for FastAPI and Flask."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock._outcomes import http_status, is_retryable
from fencelock.errors import FencelockError

logger: logging.Logger = logging.getLogger("fencelock.integrations")

ANSWERED: Final[tuple[type[Exception], ...]] = (
    *(FencelockError, DBAPIError, NoResultFound, PoolTimeoutError),
    OSError,
)


def answer_to(error: Exception, path: str) -> tuple[str, int, dict[str, str]]:
    """Return body, status and headers, without the error's text, which may name hosts and processes.

    An error with the status 500 is raised again. The text of others is logged.
    """
    status = http_status(error)
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error
    note(path, status, error)
    return HTTPStatus(status).phrase, status, {"Retry-After": "1"} if is_retryable(error) else {}


def note(path: str, status: int, error: Exception) -> None:
    logger.warning("%s answered with %s: %s", path, status, error)
