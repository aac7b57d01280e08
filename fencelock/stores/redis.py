"""A value in one Redis or Valkey that refuses stale writers.

A server that loses data loses the fence, too: in a failover to a replica that lacks the last write, by
eviction, or by a restart without `appendfsync always`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import redis
import redis.asyncio

from fencelock.errors import StaleTokenError
from fencelock.lease import assert_held, check_resource
from fencelock.tokens import check as check_token

#: Compares tokens as texts of equal length, because Lua's numbers are exact only below 2**53.
SCRIPT: Final = """
local fence = redis.call('HGET', KEYS[1], 'token')
if fence and fence > ARGV[1] then return fence end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'value', ARGV[2])
return false
"""
_DIGITS: Final = 19


class _Value:
    _is_async: ClassVar[bool]

    def __init__(self, client: Any, key: str, resource: str | None) -> None:
        is_async = isinstance(client, redis.asyncio.Redis | redis.asyncio.RedisCluster)
        is_pipeline = hasattr(client, "execute")
        if is_async != self._is_async or not hasattr(client, "register_script") or is_pipeline:
            wanted, given = "redis.asyncio" if self._is_async else "redis", type(client)
            shown = f"{given.__module__}.{given.__name__}"  # the text of the client may have a password
            raise TypeError(f"{type(self).__name__} takes a client, {wanted}.Redis, not {shown}")
        self._client = client
        self._key = key
        self._resource = check_resource(key if resource is None else resource)
        self._script: Any = client.register_script(SCRIPT)

    def _call(self, value: bytes | str, token: int | None) -> dict[str, Any]:
        chosen = assert_held(self._resource)._token_to_write() if token is None else check_token(token)
        return {"keys": [self._key], "args": [f"{chosen:0{_DIGITS}}", value]}

    def _check(self, fence: bytes | str | None, call: dict[str, Any]) -> None:
        if fence is not None:
            detail = "nothing was written to Redis"
            raise StaleTokenError(self._key, None, int(call["args"][0]), int(fence), detail=detail)


class FencedValue(_Value):
    """A value that refuses a write if the last one had a larger token; a read compares nothing.

    ```python
    rate = FencedValue(redis.Redis.from_url("redis://localhost:6379"), "rate")
    with fenced_lock("rate"):
        rate.set("1.08")
    rate.get()                                   # b"1.08"
    ```

    Args:
        client: a client of redis-py.
        key: the key of the value; no other code may write it.
        resource: the resource whose lock guards the value; by default the key.
    """

    _is_async = False

    def __init__(self, client: redis.Redis, key: str, *, resource: str | None = None) -> None:
        super().__init__(client, key, resource)

    def get(self) -> Any:
        """Return the value as bytes (a str if the client decodes); None if it was never set."""
        return self._client.hget(self._key, "value")

    def set(self, value: bytes | str, *, token: int | None = None) -> None:
        """Replace the value; by default with the token of the lease held.

        Raises:
            StaleTokenError: the value was written with a larger token.
            NotHeldError: the lock is not held here.
            LockLostError: the lease has ended.
        """
        call = self._call(value, token)
        self._check(self._script(**call), call)


class AsyncFencedValue(_Value):
    """`FencedValue` for clients of `redis.asyncio`.

    ```python
    rate = AsyncFencedValue(redis.asyncio.Redis.from_url("redis://localhost:6379"), "rate")
    async with fenced_lock("rate"):
        await rate.set("1.09")
    await rate.get()                             # b"1.09"
    ```
    """

    _is_async = True

    def __init__(self, client: redis.asyncio.Redis, key: str, *, resource: str | None = None) -> None:
        super().__init__(client, key, resource)

    async def get(self) -> Any:
        """Return the value, as `FencedValue.get`."""
        return await self._client.hget(self._key, "value")

    async def set(self, value: bytes | str, *, token: int | None = None) -> None:
        """Replace the value, as `FencedValue.set`."""
        call = self._call(value, token)
        self._check(await self._script(**call), call)
