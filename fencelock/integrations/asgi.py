"""Binds the fencing tokens of the caller during each HTTP request of an ASGI application.

A client that sets the header can write with any token. Accept the header only from trusted services, and
remove it from other requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fencelock.integrations.header import HEADER, from_header
from fencelock.lease import holding

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class FencingTokenMiddleware:
    """ASGI middleware: a request writes under the tokens that its caller sent.

    ```python
    app = FastAPI()
    app.add_middleware(FencingTokenMiddleware)
    ```

    A header that cannot be read is answered with 400. Websockets are passed on without tokens.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request to the application with its tokens bound; answer 400 if they cannot be read."""
        name = HEADER.lower().encode()
        texts = [value for key, value in scope.get("headers", ()) if key.lower() == name]
        if scope["type"] != "http" or not texts:
            await self._app(scope, receive, send)
            return
        try:
            leases = from_header(b";".join(texts).decode("latin-1"))
        except ValueError as error:
            plain = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 400, "headers": plain})
            await send({"type": "http.response.body", "body": f"{error}\n".encode()})
            return
        with holding(leases):
            await self._app(scope, receive, send)
