"""Locks: their settings, what they do step by step, and how they end."""
