"""Input from outside is checked where it comes in: times, files, templates, texts, environments."""

from __future__ import annotations

import shlex
import sqlite3
import stat
import sys
import time
from pathlib import Path

import pytest
import redis

from fencelock import AuthorityError, Database, LockTimeoutError, Redlock
from fencelock.authority.redlock.transport.endpoints import endpoint_of
from fencelock.guard import text
from proof.servers import Nodes
from tests.test_cli import program


def test_one_who_is_refused_what_looks_free_does_not_spin(tmp_path: Path) -> None:
    """A row that another program has written: held, and without an end that could be read."""
    with Database(f"sqlite:///{tmp_path}/a.db") as authority:
        with authority.lock("a"):
            pass
        with sqlite3.connect(f"{tmp_path}/a.db-leases") as file:
            file.execute("UPDATE fencelock_leases SET nonce = 'x', expires_at = 'zzzz' WHERE resource = 'a'")
            file.execute("UPDATE fencelock_leases SET expires_at = NULL WHERE resource = 'a'")
        file.close()
        began = time.process_time()
        with pytest.raises(LockTimeoutError):
            authority.lock("a", timeout=1.5).acquire()
        assert time.process_time() - began < 0.75


def test_the_file_of_leases_has_the_rights_of_its_database(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    database.touch(0o600)
    with Database(f"sqlite:///{database}") as authority, authority.lock("user:alice@example.org"):
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_no_symbolic_link_is_followed_to_leases(tmp_path: Path) -> None:
    """Another user of the folder may have put it there."""
    (tmp_path / "a.db").touch()
    (tmp_path / "a.db-leases").symlink_to(tmp_path / "elsewhere")
    with (
        Database(f"sqlite:///{tmp_path}/a.db") as authority,
        pytest.raises(AuthorityError, match="symbolic link"),
    ):
        authority.lock("a").acquire()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("query", "checks"), [("", True), ("?ssl_cert_reqs=none", None), ("?ssl_check_hostname=false", False)]
)
def test_the_name_of_a_host_is_checked(query: str, checks: bool | None) -> None:
    for source in (f"rediss://h:1{query}", f"rediss+sentinel://h:1/service{query}"):
        server = endpoint_of(source, 1.0).named[0]
        assert server.settings.get("ssl_check_hostname") is checks
    client = redis.Redis.from_url(f"rediss://h:1{query}")
    assert endpoint_of(client, 1.0).server.settings.get("ssl_check_hostname") in {checks, bool(checks)}


@pytest.mark.parametrize("part", ["/*a ", "*/ /*a ", "(", "'a' ", '"a" ', "-- a\n", "`a "])
def test_a_long_statement_is_read_once_and_in_a_time_that_grows_with_it(part: str) -> None:
    kept = text._written_before.cache_info().currsize
    took = []
    for count in (8_000, 32_000):
        statement = f"insert into x values (1) {part * count} orders"  # noqa: S608 - never executed
        began = time.process_time()
        text.written(statement, ("orders",))
        took.append(time.process_time() - began)
    assert took[1] < 0.5
    assert text._written_before.cache_info().currsize == kept


def test_the_command_gets_no_url(nodes: Nodes) -> None:
    """It may have a password; --keep-url gives it."""
    with Redlock(nodes.urls[:1]) as authority:
        authority.init()
    say = f"{shlex.quote(sys.executable)} -c 'import os; print(os.environ.get(\"FENCELOCK_URL\"))'"
    told = program("run", "a", "--", "sh", "-c", say, FENCELOCK_URL=nodes[0].url)
    assert told.stdout.strip() == "None", told.stderr
    kept = program("run", "a", "--keep-url", "--", "sh", "-c", say, FENCELOCK_URL=nodes[0].url)
    assert kept.stdout.strip() == nodes[0].url


def test_init_takes_the_url_from_the_environment(nodes: Nodes) -> None:
    done = program("init", FENCELOCK_URL=",".join(nodes.urls[:3]))
    assert "3 nodes initialised" in done.stderr
    none = program("init", FENCELOCK_URL="")
    assert (none.returncode, "set FENCELOCK_URL" in none.stderr) == (1, True)
