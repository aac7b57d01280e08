"""Event hooks of httpx that send the fencing tokens that the caller's context holds.

```python
httpx.Client(event_hooks={"request": [send_tokens]})
httpx.AsyncClient(event_hooks={"request": [send_tokens_async]})
```
"""

from __future__ import annotations

from httpx import Request

from fencelock.integrations.header import held


def send_tokens(request: Request) -> None:
    """Put the held tokens into a request; `LockLostError`, and nothing is sent, if one of them has ended."""
    request.headers.update(held())


async def send_tokens_async(request: Request) -> None:
    """Do the same for `httpx.AsyncClient`, which awaits its hooks."""
    send_tokens(request)
