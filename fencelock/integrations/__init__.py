"""Modules for other packages. A module named after a package needs it; no other module here does."""
