"""The line, by which etcd and ZooKeeper grant leases."""
