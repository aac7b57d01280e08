"""Grants leases and mints tokens. It knows nothing of the guard."""
