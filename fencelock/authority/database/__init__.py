"""A database that grants leases: PostgreSQL, MariaDB, or a file of SQLite."""
