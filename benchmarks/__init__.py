"""Measurements and long checks, run from the project's root as `python -m benchmarks.<name>`.

They need `pip install --group bench`, start their own servers, and touch no others.
"""
