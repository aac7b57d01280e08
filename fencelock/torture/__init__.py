"""Live faults on real servers, what happened under them, and whether the promises were kept.

`history.py` is what a run writes down and all that its other rooms share: workers and faults write it,
`checker.py` judges it without knowing who wrote it, `report` draws it.
"""
