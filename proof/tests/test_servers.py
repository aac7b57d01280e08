"""Servers as child processes: each test starts real ones, and most of them end in an unusual way."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import create_engine

from proof.servers import Node, Nodes, Postgres, ServerError
from proof.servers import nodes as nodes_module
from proof.servers import postgres as postgres_module
from tests.polling import eventually

RunProgram = Callable[..., "subprocess.Popen[str]"]

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root's servers change their account: run as root"
)


def ask(node: Node, *command: str) -> Any:
    """Send one command over a connection of its own, which reports an error at once."""
    retry = Retry(NoBackoff(), 0)
    with redis.Redis.from_url(node.url, retry=retry, socket_timeout=0.5, decode_responses=True) as connection:
        return connection.execute_command(*command)


def run_id(node: Node) -> str:
    """Return what tells one start of a server from the next."""
    return str(ask(node, "INFO", "server")["run_id"])


def folder_of(servers: Nodes | Postgres) -> Path:
    """Return the temporary folder of running servers."""
    assert servers._workspace is not None
    return servers._workspace.folder


def answers(postgres: Postgres) -> bool:
    """Whether the server executes a statement."""
    with psycopg.connect(postgres.dsn) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or waits only for its parent to look."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# The end of such a program is the subject. It reports what it has started on a line of JSON.
PROGRAM = """
import json, multiprocessing, os, signal, subprocess, sys, time
from proof.servers import ServerError, Nodes, Postgres

def report(nodes, *others):
    servers = [nodes, *others]
    print(json.dumps({
        "pids": [server.pid for server in [*nodes, *others]],
        "reapers": [each._workspace._belongings.reaper.pid for each in servers],
        "folders": [str(each._workspace.folder) for each in servers],
    }), flush=True)

nodes = Nodes(2).start()
"""


@pytest.fixture
def run_program() -> Iterator[RunProgram]:
    """A function that starts a program which begins with PROGRAM, and does not outlive the test."""
    programs = []

    def run(script: str, **environment: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + textwrap.dedent(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        programs.append(program)
        return program

    yield run
    for program in programs:
        program.kill()
        if program.stdout and not program.stdout.closed:
            program.communicate()


def read_report(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        pytest.fail(program.communicate()[1])
    report: dict[str, Any] = json.loads(line)
    return report


def assert_nothing_left(report: dict[str, Any]) -> None:
    """Wait until the program's servers, its reapers and its folders are gone."""
    processes, folders = [*report["pids"], *report["reapers"]], [Path(each) for each in report["folders"]]
    left = f"left: {report}"
    assert eventually(lambda: all(map(has_ended, processes))), left
    assert eventually(lambda: not any(map(Path.exists, folders))), left


def test_nodes_are_blank_servers_of_their_own_and_leave_nothing() -> None:
    """Each URL leads to another process, the one that `pid` names. A paused and a killed node end as well."""
    with Nodes(3) as nodes:
        folder = folder_of(nodes)
        assert [ask(node, "DBSIZE") for node in nodes] == [0] * 3
        assert [ask(node, "INFO", "server")["process_id"] for node in nodes] == [node.pid for node in nodes]
        assert nodes.url == ",".join(f"redis://127.0.0.1:{node.port}" for node in nodes)
        nodes[1].pause()
        nodes[2].kill()
    assert all(has_ended(node.pid) for node in nodes)
    assert not folder.exists()
    with pytest.raises(redis.ConnectionError):
        ask(nodes[0], "PING")


def test_forgotten_nodes_end() -> None:
    """The garbage collector ends nodes that the program no longer refers to. Stopped nodes start blank."""
    nodes = Nodes(1).start()
    ask(nodes[0], "SET", "key", "value")
    nodes.stop()
    nodes.stop()
    with pytest.raises(ServerError, match="have been stopped"):
        nodes[0].start()
    assert ask(nodes.start()[0], "DBSIZE") == 0
    pid, folder = nodes[0].pid, folder_of(nodes)
    del nodes
    gc.collect()
    assert has_ended(pid)
    assert not folder.exists()


def test_killed_node_comes_back_blank_on_its_port(any_server: Node) -> None:
    """Redis serves like Valkey: it is gone when `kill` returns, and then another process."""
    url, before = any_server.url, run_id(any_server)
    ask(any_server, "SET", "key", "value")
    any_server.kill()
    any_server.kill()
    assert has_ended(any_server.pid)
    with pytest.raises(ServerError, match="start it first"):
        any_server.pause()
    any_server.restart(keep_data=False)
    assert (any_server.url, ask(any_server, "DBSIZE")) == (url, 0)
    assert run_id(any_server) != before


@pytest.mark.parametrize("end", ["stop", "kill", "pause"])
def test_restart_with_and_without_data(make_nodes: Callable[..., Nodes], end: str) -> None:
    """A node that writes to disk comes back with its data, however it ended; blank it stays blank."""
    node = make_nodes(1, appendfsync="always")[0]
    url, before = node.url, run_id(node)
    ask(node, "SET", "key", "value")
    getattr(node, end)()
    node.restart(keep_data=True)
    assert (node.url, ask(node, "GET", "key")) == (url, "value")
    assert run_id(node) != before
    for keep_data in (False, True):
        node.restart(keep_data=keep_data)
        assert ask(node, "DBSIZE") == 0


def test_node_goes_back_to_an_older_copy_of_its_data(
    make_nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    """The copy is whole while the node rewrites its files; what was written after it is gone."""
    (node,) = make_nodes(1, appendfsync="always")
    for number in range(5):
        ask(node, "SET", f"key{number}", "x" * 100_000)
        ask(node, "BGREWRITEAOF")
        node.copy_data(tmp_path / str(number))
        ask(node, "SET", "late", "1")
        pid, url = node.pid, node.url
        node.roll_back(tmp_path / str(number))
        assert (node.pid != pid, node.url) == (True, url)
        assert ask(node, "DBSIZE") == number + 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a port be reserved for a server")
def test_port_of_a_dead_node_is_kept(make_nodes: Callable[..., Nodes]) -> None:
    """It is refused to others. Where another server has got it all the same, the node says so."""
    node = make_nodes(1)[0]
    node.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((node.host, node.port))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((node.host, node.port))
        listener.listen()
        with pytest.raises(ServerError, match=f"port {node.port} is in use"):
            node.start()
    port = node.port
    node.start()
    assert node.port == port


def test_dead_reaper(make_nodes: Callable[..., Nodes]) -> None:
    """Without a reaper nothing more is started: it could stay behind."""
    node = make_nodes(1)[0]
    node._workspace._belongings.reaper.kill()
    node._workspace._belongings.reaper.wait()
    with pytest.raises(ServerError, match=r"the reaper, .*, has ended"):
        node.restart(keep_data=False)


def test_port_taken_in_between(make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server that answers on the port is not mistaken for ours: the node takes another port."""
    first = make_nodes(1)[0]
    reserve = nodes_module.reserve_port
    lost = [socket.socket(fileno=os.dup(first._workspace._belongings.reservations[0].fileno()))]
    monkeypatch.setattr(nodes_module, "reserve_port", lambda: lost.pop() if lost else reserve())
    second = make_nodes(1)[0]
    assert not lost
    assert (second.port == first.port, run_id(second) == run_id(first)) == (False, False)


@pytest.mark.timed
def test_programs_that_do_not_start(tmp_path: Path) -> None:
    """The reason is in the error, in the server's own words if it has any; no process stays behind."""
    with pytest.raises(ServerError, match="no program 'no-such-server'"):
        Nodes(1, executable="no-such-server")
    program = tmp_path / "valkey-server"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    with pytest.raises(ServerError, match=r"cannot be run: .*format error"):
        Nodes(1, executable=program).start()
    program.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
    with pytest.raises(ServerError, match=r"did not answer within 0\.5 s"):
        Nodes(1, executable=program, start_timeout=0.5).start()
    assert has_ended(int((tmp_path / "pid").read_text()))
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*no-such-directive"):
        Nodes(2, settings={"no-such-directive": "1"}).start()
    with pytest.raises(ServerError, match=r"(?s)ended while starting.*no_such_setting"):
        Postgres(settings={"no_such_setting": "1"}).start()


def test_two_postgresql_servers_at_once(postgres: Postgres) -> None:
    """Each server has its own data and end, which does not wait for clients. No other user can reach it."""
    with Postgres() as other:
        listening = [one.status for one in psutil.Process(other.pid).net_connections("inet")]
        assert psutil.CONN_LISTEN not in listening
        assert stat.S_IMODE((folder_of(other) / "data").stat().st_mode) == 0o700
        connection = psycopg.connect(other.dsn, autocommit=True)
        connection.execute("CREATE TABLE only_here ()")
        with psycopg.connect(postgres.dsn) as elsewhere:
            assert elsewhere.execute("SELECT to_regclass('only_here')").fetchone() == (None,)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()
    with other.start(), psycopg.connect(other.dsn) as again:
        assert again.execute("SELECT to_regclass('only_here')").fetchone() == (None,)
    assert answers(postgres)


@pytest.fixture
def hidden_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the PostgreSQL package that only root can read; it is the one that is used."""
    installed = postgres_module.installed()
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    moved = hidden / installed.parent.name / installed.name
    shutil.copytree(installed, moved)
    libraries = installed.parent.with_name(f"{installed.parent.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, hidden / libraries.name)
    monkeypatch.setattr(postgres_module, "installed", lambda: moved)
    return hidden


@needs_root
def test_root_with_a_package_that_nobody_can_read(hidden_package: Path) -> None:
    """PostgreSQL runs from a copy, as `nobody`. The mode of the folder above the package stays."""
    with Postgres() as postgres:
        assert psutil.Process(postgres.pid).exe().startswith(str(folder_of(postgres)))
        assert answers(postgres)
        status = Path(f"/proc/{postgres.pid}/status")
        if status.exists():
            facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
            assert "0" not in [*facts["Uid"].split(), *facts["Gid"].split(), *facts["Groups"].split()]
    assert stat.S_IMODE(hidden_package.stat().st_mode) == 0o700


@pytest.mark.long
@pytest.mark.parametrize("package", ["installed", pytest.param("hidden", marks=needs_root)])
@pytest.mark.parametrize(("name", "has_room"), [("a b'\"$%41`\\", True), ("a,b", False), ("d" * 100, False)])
def test_awkward_temporary_folder(
    name: str, has_room: bool, package: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path is short and without commas; that of a copy has no sign that initdb mistakes."""
    if package == "hidden":
        request.getfixturevalue("hidden_package")
    in_place = postgres_module.can_be_run(postgres_module.installed())
    assert not (in_place and package == "hidden")
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101, S103 - as /tmp itself is
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with Postgres() as postgres:
            assert (folder_of(postgres).parent == Path(folder).resolve()) == (has_room and in_place)
            assert answers(postgres)
            engine = create_engine(postgres.url)
            engine.connect().close()
            engine.dispose()


@pytest.mark.parametrize(
    ("ending", "status"),
    [("time.sleep(600)", -signal.SIGTERM), ("os._exit(4)", 4), ("raise RuntimeError", 1)],
)
def test_program_leaves_nothing(run_program: RunProgram, ending: str, status: int) -> None:
    """Terminated, exited or crashed, also where a node is paused."""
    program = run_program(f"nodes[0].pause(); report(nodes); {ending}")
    report = read_report(program)
    if status < 0:
        program.send_signal(-status)
    assert program.wait(30) == status
    program.communicate()
    assert_nothing_left(report)


@pytest.mark.timed
def test_program_leaves_nothing_after_sigkill(run_program: RunProgram) -> None:
    """Neither busy servers, nor one that the reaper was not told of. A forked worker lives on."""
    program = run_program("""
        nodes[0].pause()
        postgres = Postgres().start()
        import psycopg
        busy = psycopg.connect(postgres.dsn, autocommit=True)
        busy.pgconn.send_query(b"SELECT pg_sleep(600)")
        untold = subprocess.Popen(
            [nodes._settings.executable, "--port", "0", "--unixsocket", "socket", "--save", ""],
            cwd=nodes._workspace.folder / "node0", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        while not os.path.exists(nodes._workspace.folder / "node0" / "socket"):
            time.sleep(0.01)
        worker = os.fork()
        if worker == 0:
            os.close(1), os.close(2)
            time.sleep(600)
        report(nodes, postgres)
        print(untold.pid, worker, flush=True)
        time.sleep(600)
    """)
    report = read_report(program)
    assert program.stdout is not None
    untold, worker = (psutil.Process(int(pid)) for pid in program.stdout.readline().split())
    report["pids"] += [child.pid for child in psutil.Process(report["pids"][-1]).children()] + [untold.pid]
    try:
        program.kill()
        program.communicate()
        assert_nothing_left(report)
        assert worker.is_running()
    finally:
        for process in (untold, worker):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.long
@pytest.mark.timed
@pytest.mark.parametrize("leave", ["sys.exit()", "os._exit(0)"])
def test_forked_child_ends_nothing(run_program: RunProgram, leave: str) -> None:
    """A child may use the servers and leave as it likes; it is refused what would act on them.

    Nor does the end of the parent's servers wait for a child, which holds the pipe to the reaper open.
    """
    program = run_program(f"""
        postgres = Postgres().start()
        child = os.fork()
        if child == 0:
            nodes.stop(), postgres.stop()
            assert nodes[0].is_running and postgres.is_running
            for action in (nodes[0].kill, nodes[0].pause, nodes[0].resume, nodes[0].stop,
                           lambda: nodes[0].restart(keep_data=False)):
                try:
                    action()
                except ServerError as error:
                    assert "belong to process" in str(error), error
                else:
                    raise AssertionError(action)
            postgres.drop_database(postgres.create_database())
            del nodes, postgres
            {leave}
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        worker = multiprocessing.get_context("fork").Process(target=nodes.stop)
        worker.start(), worker.join()
        assert worker.exitcode == 0
        time.sleep(0.5)
        import redis
        for node in nodes:
            assert redis.Redis.from_url(node.url).ping()
        postgres.drop_database(postgres.create_database())
        report(nodes, postgres)
        sleeper = os.fork()
        if sleeper == 0:
            time.sleep(600)
        begin = time.monotonic()
        nodes.stop(), postgres.stop()
        os.kill(sleeper, signal.SIGKILL)
        assert time.monotonic() - begin < 5
    """)
    report = read_report(program)
    errors = program.communicate()[1]
    assert (program.returncode, errors) == (0, "")
    assert_nothing_left(report)


@pytest.mark.timed
def test_ctrl_c_reaches_the_program_only(run_program: RunProgram) -> None:
    """Servers are in other sessions, and no signal handler is installed. The environment changes nothing."""
    program = run_program(
        """
        os.environ["LC_ALL"] = "xx"
        postgres = Postgres().start()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        report(nodes, postgres)
        time.sleep(600)
        """,
        PATH="",
        PGDATA="/nowhere",
        PGPORT="1",
        PGHOST="nowhere",
    )
    report = read_report(program)
    sessions = {os.getsid(pid) for pid in [*report["pids"], *report["reapers"]]}
    assert os.getsid(program.pid) not in sessions
    for reaper in report["reapers"]:
        os.kill(reaper, signal.SIGTERM)  # as a service manager does, to all at once
    program.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in program.communicate()[1]
    assert_nothing_left(report)
