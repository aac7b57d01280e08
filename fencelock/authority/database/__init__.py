"""A database that grants leases: PostgreSQL, MariaDB, MySQL, or a file of SQLite."""
