"""Extending held leases in the background: in batches, in time, and not for ever."""
