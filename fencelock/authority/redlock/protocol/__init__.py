"""The algorithm: commands to the nodes, and the meaning of their answers. No sockets, clock or threads."""
