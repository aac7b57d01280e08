"""The waiting line of each resource, by which etcd and ZooKeeper grant leases."""
