"""The authority on a quorum of independent Redis or Valkey nodes."""
