"""How a program reacts to an error of fencelock or of the database: try again, or answer its client.

The tables are on the page of errors. Tests compare them with the errors that databases raise.
"""

from __future__ import annotations

import socket
from http import HTTPStatus
from typing import Final

from sqlalchemy.exc import DBAPIError, NoResultFound, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock._databases import is_away, is_conflict, is_lost, is_turned_away, leaves_doubt, waited_in_vain
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    LockLostError,
    LockTimeoutError,
    QuorumError,
    ReceiptMismatchError,
    StaleTokenError,
)

#: Errors after which another try may succeed.
_TRANSIENT: Final = (LockTimeoutError, QuorumError, StaleTokenError, LockLostError)
#: Errors of asyncpg if no server listens or answers, and of SQLAlchemy if its pool has no connection left.
_UNREACHABLE: Final = (ConnectionError, TimeoutError, socket.gaierror, PoolTimeoutError)


def is_retryable(error: BaseException) -> bool:
    """Return whether another try may succeed, for a function that is one transaction and begins with `once`.

    ```python
    def again(function, tries=5):
        for attempt in range(1, tries + 1):
            try:
                function()
                break
            except Exception as error:
                if attempt == tries or not is_retryable(error):
                    raise
                time.sleep(random.random())
    ```

    Args:
        error: an error of fencelock, SQLAlchemy, a driver or the network; the outcome may be unknown.
    """
    if isinstance(error, FencelockError):
        return isinstance(error, _TRANSIENT) or error.written is None
    return _has_waited(error) or is_conflict(error) or _is_unavailable(error)


def http_status(error: BaseException) -> int:
    """Return the HTTP status of an error: 404, 409, 422, 423, 503 or 504; 500 for all others.

    `fencelock.integrations.fastapi` and `fencelock.integrations.flask` answer with it.

    ```python
    http_status(StaleTokenError("orders", (1,), 5, 7))     # 409: the client reads again, and tries again
    ```

    Args:
        error: of fencelock, SQLAlchemy, a driver or the network.
    """
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if (isinstance(error, FencelockError) and error.written is None) or _is_in_doubt(error):
        status = HTTPStatus.GATEWAY_TIMEOUT
    elif isinstance(error, StaleTokenError | LockLostError) or is_conflict(error):
        status = HTTPStatus.CONFLICT
    elif isinstance(error, LockTimeoutError) or _has_waited(error):
        status = HTTPStatus.LOCKED
    elif isinstance(error, NoResultFound):
        status = HTTPStatus.NOT_FOUND
    elif isinstance(error, ReceiptMismatchError):
        status = HTTPStatus.UNPROCESSABLE_ENTITY
    elif isinstance(error, AuthorityError) or _is_unavailable(error):
        status = HTTPStatus.SERVICE_UNAVAILABLE
    return status


def _has_waited(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and waited_in_vain(error)


def _is_in_doubt(error: BaseException) -> bool:
    """Return whether this may be an error of a COMMIT (which has no statement) with an unknown outcome."""
    is_commit = isinstance(error, DBAPIError) and error.statement is None and not is_turned_away(error)
    return is_commit and (is_lost(error) or is_away(error)) and leaves_doubt(error)


def _is_unavailable(error: BaseException) -> bool:
    """Return whether a connection was lost or could not be made, or the server takes no writes now."""
    if isinstance(error, DBAPIError):
        is_connecting = isinstance(error, OperationalError) and error.statement is None
        return is_connecting or is_lost(error) or is_away(error)
    return isinstance(error, _UNREACHABLE) or (type(error) is OSError and "connect" in str(error).lower())
