"""Leases that ZooKeeper grants."""
