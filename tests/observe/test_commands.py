"""The commands show an operator on call the holder of each lock, and say how to go on."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
import redis
from sqlalchemy import Engine, MetaData, create_engine, delete, insert, select, text
from sqlalchemy.orm import Session

from fencelock import Database, Redlock, StaleTokenError, claim, gate, receipt_table
from fencelock.cli import shared
from fencelock.cli.shared import without_password
from proof.servers import Nodes
from tests.authorities.kinds import Kind
from tests.conftest import ROOT
from tests.observe.conftest import TWO_KINDS
from tests.observe.shop import Base, Order
from tests.polling import eventually
from tests.redlock.stage import NODE_KEY
from tests.test_cli import fencelock, program


@TWO_KINDS
def test_inspect_and_top_show_the_holder_of_each_lock(kind: Kind, mine: Any) -> None:
    url = ("--url", kind.url)
    free = fencelock("inspect", "order:1", *url)
    assert (free.returncode, free.stdout) == (3, "'order:1' is free\n")
    assert fencelock("inspect", *url).stdout == "no lock is held\n"
    with mine.lock("order:1") as token, mine.lock("[red]1[/]"):
        shown = fencelock("inspect", "order:1", FENCELOCK_URL=kind.url)
        (found,) = json.loads(fencelock("inspect", "order:1", "--json", *url).stdout)
        shown_all = fencelock("inspect", *url).stdout
        top = fencelock("top", "--times", "2", "--every", "0.2", *url)
    assert shown.returncode == top.returncode == 0, shown.stderr + top.stderr
    assert str(os.getpid()) in shown.stdout
    assert str(token) in shown.stdout
    assert (found["token"], found["holder"]["pid"]) == (token, os.getpid())
    assert all(name in shown_all for name in ("order:1", "[red]1[/]"))
    assert all(text in top.stdout for text in ("order:1", "2 held"))


def test_inspect_shows_the_fence(engine: Engine, authority: Redlock, node_urls: list[str]) -> None:
    Base.metadata.create_all(engine)
    with authority.lock("order:1") as token, Session(engine) as session:
        gate(session)
        session.commit()
        database = engine.url.render_as_string(hide_password=False)
        url = ("--url", ",".join(node_urls))
        found = json.loads(fencelock("inspect", *url, "--json", "--database", database).stdout)
        assert found[0]["fence"] == token
        shown = fencelock("inspect", *url, "--database", database)
        assert "fence" in shown.stdout


def test_leaks_on_nodes(authority: Redlock, node_urls: list[str]) -> None:
    url = ("--url", ",".join(node_urls))
    with authority.lock("order:0"):
        assert fencelock("leaks", *url).returncode == 0
    for each in node_urls:
        with redis.Redis.from_url(each) as node:
            node.set(f"{NODE_KEY}:l:order:1", "mine!")
    with redis.Redis.from_url(node_urls[2]) as node:
        node.set("lock:cron", "1")
        node.set("lock:short", "1", px=60_000)
        node.hset("lock:hash", "no", "lock")
    found = fencelock("leaks", *url, "--pattern", "lock:*")
    assert found.returncode == 3, found.stderr
    assert "order:1" in found.stdout
    assert "never" in found.stdout
    assert f"lock:cron has no end on {authority.nodes[2]}" in found.stdout
    assert "lock:short" not in found.stdout
    as_json = json.loads(fencelock("leaks", *url, "--pattern", "lock:*", "--json").stdout)
    assert as_json["locks"][0]["remaining"] is None
    assert "lock:cron" in as_json["keys"][authority.nodes[2]]


def test_no_command_passes_on_what_terminals_obey(authority: Redlock, node_urls: list[str]) -> None:
    """Another program's key, or a server's error, may be made for the terminal of an operator."""
    escape = "\x1b]0;title\x07"
    with redis.Redis.from_url(node_urls[0]) as client:
        client.set(f"lock:{escape}", "1")
    found = fencelock("leaks", "--url", ",".join(node_urls), "--pattern", "lock:*")
    assert rf"lock:\x1b]0;title\x07 has no end on {authority.nodes[0]}" in found.stdout
    with answering(f"-ERR {escape}\r\n".encode()) as url:
        for command in ("nodes", "inspect r", f"init {url}", "run r --timeout 0.1 -- true"):
            found = fencelock(*command.split(), FENCELOCK_URL=url)
            assert "\x1b" not in found.stdout + found.stderr
            assert found.returncode != 0
        assert r"\x1b]0;title" in fencelock("init", url).stderr


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve a node that answers each message with the same bytes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(65536):
                self.request.sendall(answer * 8)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_leaks_in_a_database_are_leases_of_a_day(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"
    with Database(url) as authority, authority.lock("order:1", ttl=86_400, max_hold=None):
        found = fencelock("leaks", "--url", url)
        assert (found.returncode, "order:1" in found.stdout) == (3, True)
        assert fencelock("leaks", "--url", url, "--longest", "100000").returncode == 0


FORCE = ("--force", "--reason", "why")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--force", "--reason", " "), "--force"),
        (("--reason", "why"), "--force"),
        ((*FORCE, "--database", "sqlite://"), "nothing was released"),
        ((*FORCE, "--database", "sqlite://", "--claim", "orders"), "--claim orders:id=1"),
        ((*FORCE, "--database", "sqlite://", "--claim", "orders;--:id=1"), "--claim orders:id=1"),
    ],
)
def test_release_takes_nothing_by_mistake(
    authority: Redlock, node_urls: list[str], options: tuple[str, ...], word: str
) -> None:
    """Not without force and a reason, and not where nothing could be refused to the holder."""
    with authority.lock("order:1"):
        refused = fencelock("release", "order:1", "--url", ",".join(node_urls), *options)
        assert (refused.returncode, word in refused.stderr) == (1, True), refused.stderr
        assert authority.inspect("order:1") is not None


@TWO_KINDS
def test_release_by_force(mine: Any, kind: Kind) -> None:
    lock = mine.lock("order:1", ttl=6, if_lost="warn")
    lost: list[object] = []
    with lock as token:
        lock.on_lost(lost.append)
        taken = program("release", "order:1", "--force", "--reason", "it hangs", "--url", kind.url)
        assert taken.returncode == 0, taken.stderr
        assert f"process {os.getpid()}" in taken.stderr
        assert eventually(lambda: bool(lost))
        other = kind.make()
        later = other.acquire(("order:1",), ttl=5, timeout=30)
        assert later.tokens[0] > token
        other.release(later)
        other.close()
    again = fencelock("release", "order:1", "--force", "--reason", "it hangs", "--url", kind.url)
    assert again.returncode == 3


@TWO_KINDS
def test_release_from_one_process_only(mine: Any, kind: Kind) -> None:
    force = ("release", "order:1", "--force", "--reason", "it hangs", "--url", kind.url, "--holder")
    with mine.lock("order:1", if_lost="warn") as token:
        host = mine.inspect("order:1").holder.host
        other = fencelock(*force, f"1 on {host}")
        assert (other.returncode, f"not held by 1 on {host}" in other.stderr) == (3, True)
        assert mine.inspect("order:1").token == token
        older = fencelock(*force, f"{os.getpid()} on {host}", "--token", str(token - 1))
        assert older.returncode == 3
        assert mine.inspect("order:1").token == token
        assert fencelock(*force, f"{os.getpid()} on {host}").returncode == 0
        assert mine.inspect("order:1") is None
    free = fencelock(*force, f"{os.getpid()}")
    assert (free.returncode, free.stderr) == (3, "no process holds that lock\n")


def test_release_by_force_has_the_database_refuse_the_victim(
    engine: Engine, authority: Redlock, rival: Redlock, node_urls: list[str]
) -> None:
    Base.metadata.create_all(engine)
    url, database = ",".join(node_urls), engine.url.render_as_string(hide_password=False)
    held_first = authority.lock("order:1", ttl=60, renew=False, if_lost="warn")
    with held_first as token, Session(engine) as session:
        session.add(Order(id=1))
        session.commit()
        session.get_one(Order, 1)
        session.commit()
        force = ("release", "order:1", "--force", "--reason", "paused", "--url", url, "--database", database)
        taken = program(*force, "--claim", "orders:id=1")
        assert taken.returncode == 0, taken.stderr
        for write in (lambda: claim(session, Order, 1), lambda: gate(session, "order:1")):
            with pytest.raises(StaleTokenError):
                write()
            session.rollback()
        with rival.lock("order:1") as later:  # which is not refused
            claim(session, Order, 1)
            session.commit()
            again = program(*force, "--token", str(token), "--claim", "orders:id=1")
            assert (again.returncode, "is not held with token" in again.stderr) == (3, True), again.stderr
            claim(session, Order, 1)
            session.commit()
            held = authority.inspect("order:1")
            assert held is not None
            assert held.token == later
    wrong = program(*force, "--claim", "orders:id=7")
    assert "no row" in wrong.stderr


def test_release_by_force_beside_an_open_transaction(
    engine: Engine, authority: Redlock, node_urls: list[str]
) -> None:
    Base.metadata.create_all(engine)
    url, database = ",".join(node_urls), engine.url.render_as_string(hide_password=False)
    force = ("release", "order:1", "--force", "--reason", "hangs", "--url", url, "--database", database)
    with authority.lock("order:1", ttl=60, renew=False, if_lost="warn"):  # it does not hear of it meanwhile
        with Session(engine) as session:
            gate(session)
            session.flush()
            blocked = fencelock(*force)
            assert blocked.returncode == 1
            assert "SHOW PROCESSLIST" in blocked.stderr
            session.rollback()
        assert fencelock(*force).returncode == 3
        with Session(engine) as session, pytest.raises(StaleTokenError):
            gate(session, "order:1")


TELL = "import os, sys; print(os.environ['FENCELOCK_TOKEN'], os.environ['FENCELOCK_RESOURCE']); sys.exit(7)"


@TWO_KINDS
def test_run_gives_the_command_its_token_or_names_the_holder(kind: Kind, mine: Any) -> None:
    with mine.lock("job") as before:
        ran = program("run", "job", "--url", kind.url, "--timeout", "0.2", "--", "true")
        assert (ran.returncode, f"process {os.getpid()}" in ran.stderr) == (75, True), ran.stderr
    ran = program("run", "job", "--url", kind.url, "--", sys.executable, "-c", TELL)
    token, resource = ran.stdout.split()
    assert ran.returncode == 7, ran.stderr
    assert (int(token) > before, resource) == (True, "job")
    assert mine.inspect("job") is None


LOCKS_AGAIN = """
import os, fencelock
authority = fencelock.configure(os.environ["FENCELOCK_URL"])
try:
    fencelock.fenced_lock("job", timeout=60).acquire()
except fencelock.LockError as error:
    print(type(error).__name__, error)
with fencelock.fenced_lock("other"):             # another name, and the same name in another place
    fencelock.Database("sqlite:///:memory:").lock("job").acquire()
"""


@TWO_KINDS
def test_run_tells_a_command_that_locks_the_same_name(kind: Kind, mine: Any) -> None:
    assert mine
    command = "run", "job", "--keep-url", "--", sys.executable, "-c", LOCKS_AGAIN
    ran = program(*command, FENCELOCK_URL=kind.url)
    assert ran.stdout.startswith("LockError 'job' is held by the `fencelock run` that has started"), (
        ran.stderr
    )
    assert ran.returncode == 0, ran.stderr


def test_run_that_runs_nothing_says_why_in_one_line(authority: Redlock, node_urls: list[str]) -> None:
    nodes = ",".join(node_urls)
    for url, arguments, status, word in (
        (nodes, (), 2, ""),
        (nodes, ("--", "no-such-program"), 127, ""),
        (nodes, ("--ttl", "1000", "--", "true"), 2, "ValueError: a ttl"),
        ("redis://127.0.0.1:99999", ("--", "true"), 2, "ValueError"),
        ("nonsense", ("--", "true"), 2, "ValueError"),
        ("", ("--", "true"), 2, "no authority is named"),
        ("redis://127.0.0.1:1", ("--timeout", "0", "--", "true"), 74, "QuorumError"),
    ):
        ran = program("run", "job", "--url", url, *arguments)
        assert (ran.returncode, word in ran.stderr) == (status, True), ran.stderr
        assert word or len(ran.stderr.strip().splitlines()) == 1
    assert authority.inspect("job") is None


Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def begin(authority: Redlock, node_urls: list[str]) -> Iterator[Begin]:
    """Start `fencelock run job` with a script for a shell, and more options."""
    url = ",".join(authority.nodes and node_urls)
    with ExitStack() as stack:

        def start(script: str, *options: str) -> subprocess.Popen[bytes]:
            command = ["run", "job", *options, "--url", url, "--", "sh", "-c", script]
            started = subprocess.Popen(
                [sys.executable, "-m", "fencelock", *command],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            stack.enter_context(started)
            stack.callback(started.kill)
            return started

        yield start


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """Where a script writes which process it is, by `note`."""
    return tmp_path / "pids"


def note(pids: Path, pid: str = "$$") -> str:
    return f"echo {pid} > {pids}.new; mv {pids}.new {pids}"


@pytest.mark.parametrize(("ttl", "seconds"), [("1", "60"), ("60", "5")], ids=["told to end", "too short"])
def test_run_says_that_the_lock_of_its_command_was_lost(
    authority: Redlock, begin: Begin, ttl: str, seconds: str
) -> None:
    """What works on is told to end. Of a command that has ended before, its status is not enough."""
    program = begin(f"sleep {seconds}", "--ttl", ttl)
    assert eventually(lambda: authority.inspect("job") is not None)
    authority.force_release("job")
    assert b"ended before the work did" in program.communicate(timeout=60)[1]
    assert program.returncode == 76


def test_run_passes_signals_on(authority: Redlock, begin: Begin, pids: Path) -> None:
    """SIGTERM ends the command and what that has started, and the lock is given back."""
    program = begin(f"sleep 60 & {note(pids, '$!')}; wait")
    assert eventually(pids.exists)
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == 128 + signal.SIGTERM
    assert authority.inspect("job") is None
    assert eventually(lambda: not runs(pids))


@pytest.mark.parametrize("after", [0, 0.002, 0.008])
def test_run_hears_a_signal_while_it_starts_the_command(
    after: float, authority: Redlock, begin: Begin, node_urls: list[str], pids: Path
) -> None:
    program = begin(f"{note(pids)}; sleep 60")
    with redis.Redis.from_url(node_urls[0]) as node:
        while not node.exists(f"{NODE_KEY}:l:job"):
            assert program.poll() is None
    time.sleep(after)
    program.send_signal(signal.SIGTERM)
    assert program.wait(30) == 128 + signal.SIGTERM
    assert authority.inspect("job") is None
    assert not pids.exists() or eventually(lambda: not runs(pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
@pytest.mark.parametrize(
    "script",
    [
        "{}; exec sleep 60",
        "sleep 60 & {}; wait",
        "setsid sleep 60 & {}; wait",
        "(setsid sleep 60 & {}) & sleep 60",
    ],
    ids=["the command", "what it starts", "what has a session of its own", "what it has left"],
)
def test_run_that_is_killed_takes_the_whole_command_along(begin: Begin, pids: Path, script: str) -> None:
    program = begin(script.format(note(pids, "$$" if "exec" in script else "$!")))
    assert eventually(pids.exists)
    program.kill()
    assert eventually(lambda: not runs(pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_run_takes_the_command_along_when_its_helper_is_killed(begin: Begin, pids: Path) -> None:
    program = begin(f"{note(pids)}; exec sleep 60")
    assert eventually(pids.exists)
    parent_of(pids).kill()
    assert program.wait(60) == 128 + signal.SIGKILL
    assert eventually(lambda: not runs(pids))


def test_run_keeps_no_zombies(begin: Begin, pids: Path) -> None:
    """The helper is the parent of what the command has left, and waits for it."""
    begin(f"(true &); (true &); sleep 0.5; {note(pids)}; exec sleep 60")
    assert eventually(pids.exists)
    assert [each.pid for each in parent_of(pids).children()] == [int(pids.read_text())]


def test_run_kills_what_ignores_that_the_lock_was_lost(
    authority: Redlock, begin: Begin, pids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends when it is told to; what it has started does not, and is killed after the grace."""
    deaf = f"trap '' TERM; {note(pids)}; while :; do sleep 0.2; done".replace("$", r"\$")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / "sitecustomize.py").write_text("import fencelock.cli.run as run; run._GRACE = 1.0\n")
    program = begin(f'sh -c "{deaf}" & sleep 60', "--ttl", "1")
    assert eventually(pids.exists)
    authority.force_release("job")
    assert program.wait(60) == 76
    assert eventually(lambda: not runs(pids))


def parent_of(pids: Path) -> psutil.Process:
    parent = psutil.Process(int(pids.read_text())).parent()
    assert parent is not None
    return parent


def runs(pids: Path) -> bool:
    """Tell whether a process is there and has not ended.

    A process that no parent waits for stays as a zombie.
    """
    status = Path(f"/proc/{pids.read_text().strip()}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_doctor_of_healthy_nodes(authority: Redlock, node_urls: list[str]) -> None:
    with authority.lock("order:1"):
        pass
    healthy = fencelock("doctor", "--url", ",".join(node_urls))
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "append-only" in healthy.stdout


def test_doctor_names_each_ill_node_and_says_that_nothing_is_granted(
    make_nodes: Callable[..., Nodes],
) -> None:
    nodes = make_nodes(3)
    url = ("--url", ",".join(nodes.urls))
    with Redlock(nodes.urls) as authority:
        authority.init()
        with redis.Redis.from_url(nodes[0].url) as node:
            node.config_set("maxmemory", "100mb")
            node.config_set("maxmemory-policy", "allkeys-lru")
        nodes[1].kill()
        found = fencelock("doctor", *url, "--json")
    assert found.returncode == 3
    problems = {each["where"]: each for each in json.loads(found.stdout) if each["is_problem"]}
    assert "noeviction" in problems[authority.nodes[0]]["advice"]
    assert is_away(problems[authority.nodes[1]]["what"])
    nodes[2].kill()
    found = fencelock("doctor", *url)
    assert (found.returncode, "grants nothing" in found.stdout) == (3, True), found.stderr
    assert is_away(found.stdout)


def is_away(text: str) -> bool:
    return "does not vote" in text or "cannot be asked" in text


@pytest.mark.long
def test_doctor_of_a_database(engine: Engine, authority: Redlock, node_urls: list[str]) -> None:
    url = ("--url", ",".join(node_urls))
    database = ("--database", engine.url.render_as_string(hide_password=False))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE plain (id INTEGER)"))
    empty = fencelock("doctor", *url, *database)
    assert empty.returncode == 3
    assert "no fenced table" in empty.stdout
    Base.metadata.create_all(engine)
    for _ in range(20):  # more than the doctor takes itself
        with authority.lock("order:1"), Session(engine) as session:
            session.merge(Order(id=1))
            session.commit()
    models = ("--models", "tests.observe.shop:Base")
    well = json.loads(fencelock("doctor", *url, *database, *models, "--json").stdout)
    assert {each["advice"] for each in well if each["is_problem"]} <= {
        "fsync = on",  # tests need neither
        "full_page_writes = on",
    }
    wanting = fencelock("doctor", *url, *database, "--models", "tests.observe.shop:Wanting")
    assert "lacks the trigger that its model wants" in wanting.stdout.replace("\n        ", " ")
    assert "has no trigger" not in wanting.stdout
    with engine.begin() as connection:
        connection.execution_options(fencelock="bypass").execute(
            text("UPDATE orders SET last_fencing_token = 4611686018427387904")
        )
    found = fencelock("doctor", *url, *database)
    assert found.returncode == 3
    assert "--after-loss" in found.stdout


def test_nodes_that_are_not_those_of_the_list(make_nodes: Callable[..., Nodes]) -> None:
    """A program with that list locks on fewer nodes than the others believe."""
    nodes = make_nodes(4)
    with Redlock(nodes.urls[:3]) as authority:
        authority.init()
    assert fencelock("nodes", "--current", ",".join(nodes.urls[:3])).returncode == 0
    fewer = fencelock("nodes", "--current", nodes.urls[0])
    assert fewer.returncode == 1
    assert nodes.urls[1] in fewer.stderr.replace("\n", "")
    more = fencelock("nodes", "--current", ",".join(nodes.urls))
    assert more.returncode == 1
    nodes[2].kill()
    assert fencelock("nodes", "--current", ",".join(nodes.urls[:3])).returncode == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3?@h1:1,rediss://u:s3/@h2,redis://h3", "redis://:PASSWORD@h1:1,rediss://u:PASSWORD@h2,redis://h3"),
        ("postgresql+psycopg://u:s3?cret@h/db", "postgresql+psycopg://u:PASSWORD@h/db"),
        ("postgresql://h/db?user=u&password=s3&sslpassword=s3", "postgresql://h/db?user=u&password=PASSWORD&sslpassword=PASSWORD"),
        ("mysql+pymysql://h/db?Passwd=s3", "mysql+pymysql://h/db?Passwd=PASSWORD"),
    ],
)  # fmt: skip
def test_urls_without_their_passwords(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_urls_that_lead_nowhere_are_not_shown_and_make_no_file(tmp_path: Path) -> None:
    """They may have a password; and nothing is said to be free in a file that is not there."""
    for url in ("redis//u:s3cret@h:6379", "sqlite:s3cret.db"):
        ran = fencelock("inspect", "--url", url)
        assert (ran.returncode, "s3cret" in ran.stderr) == (1, False)
    url = f"sqlite:///{tmp_path}/typo.db"
    for command in (("inspect", "--url", url), ("history", "r", "--database", url), ("top", "--url", url)):
        ran = fencelock(*command)
        assert (ran.returncode, "no file" in ran.stderr) == (1, True)
    made = fencelock("init", f"sqlite:///{tmp_path}/a.db", "--after-loss", "--database", url, "--yes")
    assert (made.returncode, "there is no file" in made.stderr) == (1, True)
    assert not (tmp_path / "typo.db").exists()


@pytest.mark.usefixtures("authority")
def test_names_are_shown_as_they_are(node_urls: list[str]) -> None:
    url = ("--url", ",".join(node_urls))
    assert fencelock("inspect", "[/]", *url).stdout == "'[/]' is free\n"
    for each in node_urls:
        with redis.Redis.from_url(each) as node:
            node.set(f"{NODE_KEY}:l:[b]", "mine!")
            node.set(b"lock:\xfe", "1")
    found = fencelock("leaks", *url, "--pattern", "lock:*").stdout
    assert "[b]" in found
    assert "never" in found
    assert "[red]" not in found
    assert "lock:\\xfe has no end" in found


def test_leaks_where_a_node_is_down(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(3)
    assert fencelock("init", *nodes.urls).returncode == 0
    with redis.Redis.from_url(nodes[2].url) as node:
        node.set("lock:cron", "1")
    nodes[0].kill()
    found = fencelock("leaks", "--url", ",".join(nodes.urls), "--pattern", "lock:*", "--json")
    assert found.returncode == 3
    assert len(json.loads(found.stdout)["keys"]) == 2
    nodes[1].kill()
    assert "1 of 3 nodes can vote" in fencelock("leaks", "--url", ",".join(nodes.urls)).stderr


def test_passwords_are_never_printed(make_nodes: Callable[..., Nodes]) -> None:
    nodes = make_nodes(2, password="s3cret")
    url = nodes.urls[0]
    assert "s3cret" in url
    wrong = url.replace("s3cret", "wr0ng-s3cret")
    commands = (
        ("inspect",),
        ("leaks", "--pattern", "*"),
        ("top", "--times", "1"),
        ("doctor", "--database", "postgresql+psycopg://user:s3cret@127.0.0.1:1/none"),
        ("release", "r", "--force", "--reason", "why"),
        ("run", "r", "--", "true"),
        ("nodes",),
    )
    blank, unknown = nodes.urls[1], "nonsense://u:s3cret@h/x"
    made = fencelock("init", url)
    assert f"export FENCELOCK_URL={url.replace('s3cret', 'PASSWORD')}" in made.stderr
    for command in (
        *commands,
        ("nodes", "replace", url, blank),
        ("init", blank, "--after-loss", "--database", unknown),
        ("init", "http://:s3cret@h"),
    ):
        for given in (url, wrong):
            ran = (program if command[0] == "run" else fencelock)(*command, FENCELOCK_URL=given)
            assert "s3cret" not in ran.stdout + ran.stderr, command


def test_history_that_no_program_writes(tmp_path: Path) -> None:
    create_engine(f"sqlite:///{tmp_path}/a.db").connect().close()
    found = fencelock("history", "order:1", "--database", f"sqlite:///{tmp_path}/a.db")
    assert (found.returncode, "fencelock.observe.history.record(engine)" in found.stderr) == (1, True)


def test_prune_deletes_what_was_locked_long_ago(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    with Database(url) as database:
        database.release(database.acquire(("order:1",), ttl=5, timeout=0))
    found = fencelock("prune", "--url", url, "--older-than", "12h")
    assert (found.returncode, found.stderr) == (0, "0 rows of free resources deleted\n")
    assert not (tmp_path / "app.db").exists()
    for older, said in (("soon", "is no time such as 30d"), ("0h", "at least an hour")):
        found = fencelock("prune", "--url", url, "--older-than", older)
        assert found.returncode == 1
        assert said in found.stderr


def test_json_has_no_character_that_terminals_obey(capsys: pytest.CaptureFixture[str]) -> None:
    shared.print_json(["\x9b2J\u202e"])
    assert capsys.readouterr().out.isascii()


def test_a_database_is_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users of a machine see arguments, and with them a password."""
    monkeypatch.setenv("SHOP_DATABASE", f"sqlite:///{tmp_path}/none.db")
    found = fencelock("history", "r", "--database", "SHOP_DATABASE")
    assert "none.db" in found.stderr
    assert found.returncode == 1


def test_prune_deletes_old_receipts(tmp_path: Path, node_urls: list[str]) -> None:
    url, metadata = f"sqlite:///{tmp_path}/app.db", MetaData()
    receipts, engine = receipt_table(metadata), create_engine(f"sqlite:///{tmp_path}/app.db")
    metadata.create_all(engine)
    nodes = ("--url", ",".join(node_urls))
    for where, said in (
        (("--url", url), "0 rows of free resources deleted\n1 receipts deleted\n"),
        ((*nodes, "--database", url), "1 receipts deleted\n"),
    ):
        with engine.begin() as connection:
            connection.execute(delete(receipts))
            for days in (10, 40):
                at = datetime.now(UTC) - timedelta(days=days)
                connection.execute(insert(receipts), {"key": f"{days} days", "at": at})
        found = fencelock("prune", *where, "--older-than", "30d")
        assert (found.returncode, found.stderr) == (0, said)
        with engine.connect() as connection:
            assert connection.scalars(select(receipts.c.key)).all() == ["10 days"]
    engine.dispose()
    found = fencelock("prune", *nodes, "--older-than", "30d")
    assert (found.returncode, "--database URL" in found.stderr) == (1, True)


def test_commands_take_the_url_of_a_program_for_coroutines(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/app.db"
    with Database(f"sqlite:///{tmp_path}/app.db") as database, database.lock("order:1"):
        found = fencelock("inspect", "--url", url, "--json")
    assert [each["resource"] for each in json.loads(found.stdout)] == ["order:1"]
