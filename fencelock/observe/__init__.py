"""Events, metrics and spans of locks and fences.

`fencelock.on_event` adds a listener for events. `fencelock.observe.prometheus` and `fencelock.observe.otel`
make metrics and spans of them. Locks and the guard import none of these modules. Without a listener, events
cost very little.
"""

from fencelock._events import *  # noqa: F403 - the events
from fencelock._events import __all__ as __all__
