"""FastAPI: answers to errors, and the header `Idempotency-Key` for the key of `once` and `fenced_once`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import Header, HTTPException, Request

from fencelock.errors import LockTimeoutError, ReceiptMismatchError
from fencelock.integrations.answers import note
from fencelock.integrations.starlette import answer_errors

__all__ = ["answer_errors", "idempotency_key"]

#: The most characters of a key; a prefix such as "deposit:" must still fit into the key of a receipt.
MAX_KEY: Final = 200


async def idempotency_key(
    request: Request,
    header: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
) -> AsyncIterator[str]:
    """Yield the `Idempotency-Key` of a request, for `Annotated[str, Depends(idempotency_key)]`.

    ```python
    @app.post("/deposits")
    def deposit(user: int, key: Annotated[str, Depends(idempotency_key)]) -> dict[str, int]:
        with Session(engine) as session:
            receipt = once(session, f"deposit:{user}:{key}")  # else users get each other's answers
            ...
    ```

    The IETF's draft "The Idempotency-Key HTTP Header Field" writes the key in quotes, which are removed.
    The logger `fencelock.integrations` has the errors that are answered with 409 and 422.

    Raises:
        fastapi.HTTPException: 400 if the header is missing, ambiguous, too long or not printable; 422 if the
            key was used for another request (`ReceiptMismatchError`); 409 with `Retry-After` if another
            request with the same key, or for the same resource, is under way (`LockTimeoutError`).
    """
    key = (header or "").strip().strip('"').strip()
    if len({*request.headers.getlist("idempotency-key")}) > 1:
        raise HTTPException(400, "this request has several different headers Idempotency-Key")
    if not key:
        raise HTTPException(400, "this request needs the header Idempotency-Key")
    if len(key) > MAX_KEY or not key.isprintable():
        raise HTTPException(400, f"an Idempotency-Key has at most {MAX_KEY} characters that can be printed")
    try:
        yield key
    except ReceiptMismatchError as error:
        note(request.url.path, 422, error)
        raise HTTPException(422, "this Idempotency-Key was used for another request") from None
    except LockTimeoutError as error:
        note(request.url.path, 409, error)
        wait = {"Retry-After": "1"}
        raise HTTPException(409, "another request is under way: try again", wait) from None
