"""`python -m fencelock` is the command line."""

from fencelock.cli import main

main()
