"""SQLAlchemy's own tests, run with the guard in place: a program with a fenced model loses nothing by it."""
