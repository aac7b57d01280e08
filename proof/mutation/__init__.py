"""Changes the library in one place, and runs the tests that touch the place: what does the suite see?

The tool is our own, because neither mutmut nor cosmic-ray draws a number of changes by a seed or runs only
the tests of a line, and because our tests start programs of their own, which must see the change, too.
"""
