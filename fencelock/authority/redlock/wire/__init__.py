"""Connections to nodes as pure state: callers pass in received bytes and the time, and get bytes to send."""
