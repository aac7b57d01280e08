"""The command line. `app` has all commands, the other modules those of one subject each."""
