"""Tasks of Celery that run under the fencing tokens of the code that called them.

```python
app = Celery("tasks", task_cls="fencelock.integrations.celery:FencedTask")
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fencelock.errors import StaleReadError, StaleTokenError
from fencelock.integrations.header import HEADER, bound, from_header, held

if TYPE_CHECKING:

    class _Task:  # Celery has no types
        request: Any
        run: Callable[..., Any]

        def apply_async(self, *args: Any, **options: Any) -> Any: ...
        def retry(self, *args: Any, **options: Any) -> Any: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
else:
    from celery import Task as _Task


class FencedTask(_Task):
    """A task whose message carries the tokens of the leases that its caller holds.

    ```python
    tasks = Celery("tasks", broker="redis://localhost:6379", task_cls=FencedTask)

    @tasks.task(bind=True)
    def ship(self: FencedTask, order_id: int) -> None:
        if order_id > 100:
            raise self.retry(countdown=60)

    with fenced_lock("order:1"):
        ship.apply_async([1])                    # or ship.delay(1)
    ```

    The later tasks of a chain, links and the body of a chord carry no token, because the worker sends them
    after the task, when the caller may not hold the lock any more. Such a task locks by itself.

    A signal handler cannot do this: Celery only logs its error, and would run the task without the token.
    """

    abstract: bool = True

    def apply_async(self, *args: Any, headers: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """Call the task under the held leases, and return what Celery returns.

        Raises:
            LockLostError, CommitInDoubtError, ValueError: see `fencelock.integrations.header.held`. The task
                is not called.
        """
        return super().apply_async(*args, headers={**(headers or {}), **held()}, **options)

    def retry(self, args: Any = None, kwargs: Any = None, exc: Any = None, **options: Any) -> Any:
        """Retry the task, and return what Celery returns.

        Raises:
            StaleTokenError: `exc`, if the token of the task's message is stale, as it would be in each retry.
        """
        received = from_header((self.request.headers or {}).get(HEADER, ""))
        is_stale = isinstance(exc, StaleTokenError) and not isinstance(exc, StaleReadError)
        if is_stale and exc.token in {lease.token for lease in received}:
            raise exc
        return super().retry(args, kwargs, exc, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task under the tokens of its message, if any; `ValueError` if they cannot be read."""
        if self.request.called_directly:
            return super().__call__(*args, **kwargs)
        if self.request.is_eager:  # the task runs in the caller's context, which has the leases
            return self.run(*args, **kwargs)
        with bound((self.request.headers or {}).get(HEADER, "")):
            return self.run(*args, **kwargs)
