"""Live faults on real servers, what happened under them, and whether the promises were kept.

`history.py` is what a run writes down and all that its other rooms share: workers and faults write it,
`checker.py` judges it without knowing its writer, `trace.py` and `picture.py` draw it.

A run, from the outside to the inside: `command.py` reads the command line, `run.py` starts servers, lets
workers work and faults happen (`settings.py` says how much of each), and puts the history together. `crew.py`
keeps the worker processes, `worker.py` is one: it chooses how to behave (`plan.py`), locks, adds to a row
(`storage.py`, `table.py`), and writes its journal (`journal.py`). `faults.py` breaks what stands on the stage
(`stage.py`), with a network (`proxy.py`), clocks (`clocks.py`) and COMMITs (`doubt.py`) made for it.
`clusters.py` breaks nodes of Galera and Patroni, and `service.py` measures what that costs a client.
`lease_connections.py` ends connections over which a database grants leases. `naive.py` has locks that must
fail.
"""
