"""Random histories of the line that grants leases in etcd and in ZooKeeper; `python -m proof.line`."""
