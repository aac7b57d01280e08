"""`python -m fencelock` runs the command line."""

from fencelock.cli.app import main

main()
