"""Where nodes are: what their URLs or clients say, and which servers to connect to."""
