"""Real servers as child processes: nodes and a PostgreSQL out of wheels, for tests, proofs and benchmarks."""

from proof.servers.embedded import Node, Nodes, Postgres
from proof.servers.workspace import ServerError

__all__ = ["Node", "Nodes", "Postgres", "ServerError"]
