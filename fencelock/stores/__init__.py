"""Values outside of the database that refuse stale writers: in Redis, and in a file."""
