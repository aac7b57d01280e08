"""Locks: their settings, their operations as generators, their renewal and their release."""
