"""The commands for whoever is on call: each module has some, and `fencelock.cli` names them."""
