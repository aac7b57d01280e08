"""The storage side. Knows SQLAlchemy, knows nothing of Redis."""
