"""What grants leases and mints tokens. Knows nothing of the guard, nor of SQLAlchemy."""
