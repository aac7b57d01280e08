"""SQLAlchemy's own tests, run with the guard in place: whoever has a fenced model loses nothing by it."""
