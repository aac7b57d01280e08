"""Fences in Alembic: operations for migrations, and an autogenerate that knows them.

`pip install 'fencelock[alembic]'` is all that it takes: Alembic (1.18 or later) finds the plugin by itself.
`alembic revision --autogenerate` writes the operations. `alembic check` notices what is missing, a
trigger that SQLite's batch mode has dropped included.
"""
