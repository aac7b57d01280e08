"""Event hooks of httpx that send the fencing tokens of the leases held.

```python
httpx.Client(event_hooks={"request": [send_tokens]})
httpx.AsyncClient(event_hooks={"request": [send_tokens_async]})
```
"""

from __future__ import annotations

from httpx import Request

from fencelock.integrations.header import HEADER, held


def send_tokens(request: Request) -> None:
    """Put the tokens of the held leases into a request.

    ```python
    client = httpx.Client(event_hooks={"request": [send_tokens]})
    ```

    A redirect to another host gets none.

    Raises:
        LockLostError, CommitInDoubtError, ValueError: see `held`. The request is not sent.
    """
    host = request.url.scheme, request.url.host, request.url.port
    if request.extensions.setdefault("fencelock.host", host) == host:
        request.headers.update(held())
    else:
        request.headers.pop(HEADER, None)


async def send_tokens_async(request: Request) -> None:
    """Put the tokens into a request of `httpx.AsyncClient`, which awaits its hooks: see `send_tokens`.

    ```python
    client = httpx.AsyncClient(event_hooks={"request": [send_tokens_async]})
    ```
    """
    send_tokens(request)
