"""A promoted standby lacks the last grants of its primary. Its tokens are larger all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from fencelock import Database, LockTimeoutError, QuorumError
from proof.servers import Postgres
from tests.polling import eventually

pytestmark = pytest.mark.long


class Standby(Postgres):
    """A server that copies another one, and follows it until it is promoted."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__(settings={"port": "5433"})  # what it copies has a socket of the other name
        self._primary = primary

    def _making_a_cluster(self, programs: Path) -> list[str | Path]:
        return [
            *(programs / "pg_basebackup", "--write-recovery-conf", "--no-sync", "--checkpoint=fast"),
            *("--dbname", self._primary.dsn),
        ]

    def follow_no_more(self) -> None:
        """Receive nothing more: the link to the primary is down."""
        self.ask("ALTER SYSTEM SET primary_conninfo = ''")
        self.ask("SELECT pg_reload_conf()")
        assert eventually(lambda: self.ask("SELECT count(*) FROM pg_stat_wal_receiver") == 0)

    def ask(self, statement: str) -> Any:
        """Return the first value of an answer."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None  # type: ignore[index]


@pytest.fixture
def primary() -> Iterator[Postgres]:
    """A server of this test, with the table of leases."""
    with Postgres() as server:
        with Database(server.url) as authority:
            authority.init()
        yield server


def test_promoted_standby_mints_larger_tokens(primary: Postgres) -> None:
    with Standby(primary) as standby, Database(primary.url) as before, Database(standby.url) as after:
        known = before.acquire(("known",), ttl=3, timeout=2)
        ask = "SELECT count(*) FROM fencelock_leases WHERE resource = 'known'"
        assert eventually(lambda: bool(standby.ask(ask) == 1))
        with pytest.raises(QuorumError, match=r"read-only.* name all hosts"):
            after.acquire(("r",), ttl=30, timeout=0)
        with pytest.raises(QuorumError, match=r"does not know of all locks.* name all hosts"):
            after.inspect("known")
        standby.follow_no_more()
        assert before.release(known) is True
        granted = [before.acquire((name,), ttl=30, timeout=2).tokens[0] for name in ("known", "missed")]
        primary.stop()
        standby.ask("SELECT pg_promote()")

        with pytest.raises(LockTimeoutError):
            after.acquire(("known",), ttl=30, timeout=0)
        for name in ("missed", "new", "known"):
            (token,) = after.acquire((name,), ttl=30, timeout=5).tokens
            assert token > max(granted)
            assert token & 1023 != granted[0] & 1023, "a server that lives on could mint the same token"


def test_release_that_a_failover_has_lost_is_sent_again(primary: Postgres) -> None:
    """The old primary has confirmed it, and the new one believes that the lock is held for a minute."""
    with Standby(primary) as standby:
        hosts = [dict(make_url(server.url).query) for server in (primary, standby)]
        query = {name: [str(each[name]) for each in hosts] for name in ("host", "port")}
        query["host"] = [":".join(pair) for pair in zip(query["host"], query.pop("port"), strict=True)]
        url = make_url(primary.url).set(query={**query, "target_session_attrs": "read-write"})
        with Database(url) as authority:
            grant = authority.acquire(("r",), ttl=60, timeout=2)
            ask = "SELECT count(*) FROM fencelock_leases WHERE resource = 'r'"
            assert eventually(lambda: bool(standby.ask(ask) == 1))
            standby.follow_no_more()
            assert authority.release(grant) is True
            primary.stop()
            standby.ask("SELECT pg_promote()")

            def is_granted() -> bool:
                try:
                    return bool(authority.acquire(("r",), ttl=60, timeout=1))
                except (LockTimeoutError, QuorumError):
                    return False

            assert eventually(is_granted)
