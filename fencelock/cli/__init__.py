"""The command line. `app` has all commands; each other module has the commands of one subject."""
