"""Connections to nodes as pure state: bytes and the time come in, bytes go out."""
