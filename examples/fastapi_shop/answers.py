"""What a client is told of an error: whether to try again, and nothing of what is inside."""

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from sqlalchemy.exc import DBAPIError, NoResultFound

from fencelock import (
    AuthorityError,
    FencelockError,
    LockLostError,
    LockTimeoutError,
    ReceiptMismatchError,
    StaleTokenError,
)

logger = logging.getLogger(__name__)

# What PostgreSQL says by its SQLSTATE: conflicts, waiting in vain, a server that takes no writes now.
SQLSTATES = {"40001": 409, "40P01": 409, "55P03": 423, "25P03": 503}
SQLSTATES |= dict.fromkeys(("57P01", "57P02", "57P03", "53300", "25006"), 503)


def status_of(error: Exception) -> int:
    match error:
        case DBAPIError(connection_invalidated=True):  # it ended before the COMMIT, or in it
            return 503 if error.statement else 504
        case DBAPIError():
            return SQLSTATES.get(getattr(error.orig, "sqlstate", ""), 500)
        case NoResultFound():
            return 404
        case FencelockError(written=None):  # a lost lease, or a COMMIT in doubt
            return 504
        case StaleTokenError() | LockLostError():
            return 409
        case LockTimeoutError():
            return 423
        case ReceiptMismatchError():
            return 422
        case AuthorityError() | OSError():  # no locks now; asyncpg: no connection can be made
            return 503
    return 500


async def answer(request: Request, error: Exception) -> Response:
    if (status := status_of(error)) == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error  # a bug: the log gets its traceback
    logger.warning("%s %s: %s", status, request.url.path, error)  # it names hosts: nothing for clients
    headers = {"Retry-After": "1"} if status in {409, 423, 503, 504} else {}
    return Response(HTTPStatus(status).phrase, status, headers, "text/plain")


def install(app: FastAPI) -> None:
    for kind in (FencelockError, DBAPIError, NoResultFound, OSError):
        app.add_exception_handler(kind, answer)
