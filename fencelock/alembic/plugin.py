"""The entry point for Alembic.

It imports nothing of Alembic and no `operations` before it is called. Alembic and this package load each
other, so one of them would be half imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from alembic.runtime.plugins import Plugin

PLUGIN_NAME: Final = "alembic.autogenerate.fencelock"
"""Under `alembic.autogenerate`, because that is what an environment uses that chooses no plugins."""


class _PluginModule(ModuleType):
    """Alembic 1.20 wants the entry point to be a module, earlier ones a collection of modules."""

    def __iter__(self) -> Iterator[_PluginModule]:
        yield self

    def setup(self, registered: Plugin) -> None:
        """Register the operations, by importing them, and what autogenerate compares."""
        from alembic.util import DispatchPriority  # noqa: PLC0415  see the module's docstring

        from fencelock.alembic import operations  # noqa: F401, PLC0415  the same

        registered.add_autogenerate_comparator(_compare, "table", "fencelock")
        registered.add_autogenerate_comparator(_say, "schema", "fencelock", priority=DispatchPriority.LAST)


def _compare(*table: Any) -> Any:
    from fencelock.alembic.autogenerate import compare_trigger  # noqa: PLC0415  the same

    return compare_trigger(*table)


def _say(*upgrade: Any) -> Any:
    from fencelock.alembic.autogenerate import use_operations  # noqa: PLC0415  the same

    return use_operations(*upgrade)


def register() -> None:
    """Make the operations and autogenerate known to an Alembic before 1.18: call it in `env.py`."""
    from alembic.autogenerate import comparators  # noqa: PLC0415  the same

    from fencelock.alembic import operations  # noqa: F401, PLC0415  the same

    comparators.dispatch_for("table")(_compare)
    comparators.dispatch_for("schema")(_say)


plugin: Final = _PluginModule(__name__, __doc__)
