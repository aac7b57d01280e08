"""Real servers as child processes, out of wheels: for tests, proofs, benchmarks and the demo.

`Nodes` are Valkey (or any Redis) nodes, `Postgres` is a PostgreSQL, `Etcd` are members of an etcd cluster;
`ZooKeeper` is not out of a wheel: it needs Java, and ZooKeeper's library, of the system.

```
with Nodes(5) as nodes, Postgres() as postgres:
    fencelock.configure(nodes.url)
    engine = create_engine(postgres.create_database())
    nodes[0].kill()
```

What holds for all:

- A server belongs to the process that started it and ends with it, even where that process gets
  SIGKILL: a small reaper process outlives it, ends the servers and removes their temporary folder.
- A forked child may use the servers, and never ends them: there `stop` does nothing, and whatever
  else would act on a server is refused.
- Servers and reaper run in sessions of their own: Ctrl-C reaches the program, not them. No signal
  handler is installed.
- Servers are for throw-away data on one machine: they are not reachable from others.
"""

from proof.servers.etcd import Etcd
from proof.servers.nodes import Node, Nodes
from proof.servers.postgres import Postgres
from proof.servers.workspace import ServerError
from proof.servers.zookeeper import ZooKeeper

__all__ = ["Etcd", "Node", "Nodes", "Postgres", "ServerError", "ZooKeeper"]
