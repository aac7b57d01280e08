"""The shipped algorithm in a world of its own: nodes, network, clocks and storage follow from a seed."""
