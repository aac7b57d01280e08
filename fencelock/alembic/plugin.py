"""The entry point for Alembic.

Alembic loads this module during its own import. So Alembic and `operations` are imported only in functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from alembic.runtime.plugins import Plugin

PLUGIN_NAME: Final = "alembic.autogenerate.fencelock"
"""Under `alembic.autogenerate`, because an environment that chooses no plugins uses those under this name."""


class _PluginModule(ModuleType):
    """The entry point. Alembic 1.20 expects a module, earlier versions a collection of modules."""

    def __iter__(self) -> Iterator[_PluginModule]:
        yield self

    def setup(self, registered: Plugin) -> None:
        """Register the operations, by importing them, and the comparisons of autogenerate."""
        from alembic.util import DispatchPriority  # noqa: PLC0415  see the module's docstring

        from fencelock.alembic import operations  # noqa: F401, PLC0415  see the module's docstring

        registered.add_autogenerate_comparator(_compare, "table", "fencelock")
        registered.add_autogenerate_comparator(_say, "schema", "fencelock", priority=DispatchPriority.LAST)


def _compare(*table: Any) -> Any:
    from fencelock.alembic.autogenerate import compare_trigger  # noqa: PLC0415  see the module's docstring

    return compare_trigger(*table)


def _say(*upgrade: Any) -> Any:
    from fencelock.alembic.autogenerate import use_operations  # noqa: PLC0415  see the module's docstring

    return use_operations(*upgrade)


def register() -> None:
    """Register the operations and comparisons with an Alembic before 1.18: call it in `env.py`."""
    from alembic.autogenerate import comparators  # noqa: PLC0415  see the module's docstring

    from fencelock.alembic import operations  # noqa: F401, PLC0415  see the module's docstring

    comparators.dispatch_for("table")(_compare)
    comparators.dispatch_for("schema")(_say)


plugin: Final = _PluginModule(__name__, __doc__)
