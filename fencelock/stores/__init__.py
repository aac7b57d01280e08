"""Values outside of the database that refuse stale writers, too: in Redis, and in a file."""
