"""How the claims are proven: a model, a simulation of the shipped code, live faults, and what the tests see.

None of it is in the wheel, and nothing in `fencelock` imports from it.
"""
