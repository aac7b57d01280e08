"""`python -m fencelock` is the command line."""

from fencelock.cli.app import main

main()
