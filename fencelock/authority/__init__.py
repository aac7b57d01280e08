"""Grants leases and mints tokens. This package imports nothing of the guard."""
