"""FastAPI: answers to errors, and the header `Idempotency-Key` for the key of `once` and `fenced_once`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import FastAPI, Header, HTTPException, Request, Response

from fencelock.errors import LockTimeoutError, ReceiptMismatchError
from fencelock.integrations._answers import ANSWERED, answer_to, note

#: The most characters of a key; a prefix such as "deposit:" must still fit into the key of a receipt.
MAX_KEY: Final = 200


def answer_errors(app: FastAPI) -> None:
    """Answer errors by `http_status`, and with `Retry-After` if a client should try again.

    ```python
    fencelock.integrations.fastapi.answer_errors(app)
    ```

    The logger `fencelock.integrations` has the answered errors. One with the status 500 is raised again.
    """

    async def answer(request: Request, error: Exception) -> Response:
        text, status, headers = answer_to(error, request.url.path)
        return Response(text, status, headers, "text/plain")

    for kind in ANSWERED:
        app.add_exception_handler(kind, answer)


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
