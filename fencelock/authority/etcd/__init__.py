"""Leases that etcd grants."""
