"""What a client is told of an error: whether to try again, and nothing of what is inside."""

from http import HTTPStatus

from flask import Flask, Response, current_app
from sqlalchemy.exc import DBAPIError, NoResultFound

from fencelock import (
    AuthorityError,
    FencelockError,
    LockLostError,
    LockTimeoutError,
    ReceiptMismatchError,
    StaleTokenError,
)


def status_of(error: Exception) -> int:
    match error:
        case DBAPIError():  # another transaction has the file: "database is locked"
            return 423 if getattr(error.orig, "sqlite_errorname", "") == "SQLITE_BUSY" else 500
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
        case AuthorityError():  # no locks now
            return 503
    return 500


def answer(error: Exception) -> Response:
    if (status := status_of(error)) == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise error  # a bug: the log gets its traceback
    current_app.logger.warning("%s: %s", status, error)  # it names processes: nothing for clients
    headers = {"Retry-After": "1"} if status in {409, 423, 503, 504} else {}
    return Response(HTTPStatus(status).phrase, status, headers, mimetype="text/plain")


def install(app: Flask) -> None:
    for kind in (FencelockError, DBAPIError, NoResultFound):
        app.register_error_handler(kind, answer)
