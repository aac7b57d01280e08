"""Opens sockets, and moves bytes between them and `wire`."""
