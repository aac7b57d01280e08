"""The servers of tests/conftest.py, for the tests of the proofs' own tools."""

from tests.conftest import (  # noqa: F401 - pytest finds fixtures by their names
    alembic_plugin,
    any_server,
    database_url,
    engine,
    etcd_cluster,
    etcd_url,
    make_nodes,
    mariadb_url,
    node_urls,
    nodes,
    postgres,
    postgres_database,
    server_program,
    shared_nodes,
    zookeeper_server,
    zookeeper_url,
)
