"""The algorithm: what to say to the nodes, and what their answers mean. No sockets, no clock, no threads."""
