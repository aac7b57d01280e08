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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil
import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import Engine, create_engine, inspect, text

from proof.servers import Node, Nodes, Postgres, ServerError, embedded
from tests.polling import eventually

RunProgram: TypeAlias = Callable[..., "subprocess.Popen[str]"]

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root's servers change their account: run as root"
)


def client(node: Node, **options: Any) -> redis.Redis:
    """Return a client that says at once what is wrong."""
    return redis.Redis.from_url(node.url, retry=Retry(NoBackoff(), 0), socket_timeout=0.5, **options)


def ask(node: Node, *command: str) -> Any:
    """Send one command over a connection of its own."""
    with client(node, decode_responses=True) as connection:
        return connection.execute_command(*command)


def run_id(node: Node) -> str:
    """Return what tells one start of a server from the next."""
    with client(node) as connection:
        about: Any = connection.info("server")
    return str(about["run_id"])


def configured(node: Node, setting: str) -> Any:
    """Return what a server says about one of its settings."""
    with client(node, decode_responses=True) as connection:
        settings: Any = connection.config_get(setting)
    return settings[setting]


def folder_of(servers: Nodes | Postgres) -> Path:
    """Return the temporary folder of running servers."""
    assert servers._workspace is not None
    return servers._workspace.folder


def has_ended(pid: int) -> bool:
    """Whether a process is no more, or waits only for its parent to look."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def port_taker() -> Iterator[Callable[[int], socket.socket]]:
    """A function that listens on a port, as a server of somebody else's would."""
    taken = []

    def take(port: int) -> socket.socket:
        listener = socket.socket()
        taken.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        return listener

    yield take
    for listener in taken:
        listener.close()


# What a program does whose end is the subject. It reports what it has started on a line of JSON.
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
    """Return what the program has started."""
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        pytest.fail(program.communicate()[1])
    report: dict[str, Any] = json.loads(line)
    return report


def assert_nothing_left(report: dict[str, Any]) -> None:
    """Wait until the program's servers, its reapers and its folders are gone."""
    for pid in [*report["pids"], *report["reapers"]]:
        assert eventually(lambda pid=pid: has_ended(pid)), f"process {pid} is left"  # type: ignore[misc]
    for folder in report["folders"]:
        assert eventually(lambda folder=folder: not os.path.exists(folder)), f"{folder} is left"  # type: ignore[misc] # noqa: PTH110


class TestNodes:
    """A fleet as a whole."""

    def test_nodes_are_blank_servers_of_their_own(self) -> None:
        """Each URL leads to another server process, the one that `pid` names, with nothing in it."""
        with Nodes(5) as nodes:
            pids = []
            for node in nodes:
                assert ask(node, "DBSIZE") == 0
                with client(node) as connection:
                    about: Any = connection.info("server")
                pids.append(about["process_id"])
            assert pids == [node.pid for node in nodes]
            assert len(set(pids)) == 5
            assert nodes.urls == [f"redis://127.0.0.1:{node.port}" for node in nodes]
            assert nodes.url == ",".join(nodes.urls)

    def test_nodes_are_a_sequence(self, nodes: Nodes) -> None:
        """A fleet has a length, indexes, slices and an order."""
        assert len(nodes) == 5
        assert nodes[-1] is list(nodes)[4]
        assert nodes[1:3] == (nodes[1], nodes[2])

    def test_leaving_the_block_leaves_nothing(self) -> None:
        """After the block there is no process, no folder, and nobody listening."""
        with Nodes(3) as nodes:
            folder = folder_of(nodes)
            nodes[1].pause()
            nodes[2].kill()
        assert all(has_ended(node.pid) for node in nodes)
        assert not folder.exists()
        with pytest.raises(redis.ConnectionError):
            ask(nodes[0], "PING")

    def test_stopping_and_starting_again(self) -> None:
        """Stop before a start and stop twice do nothing; a start after it makes a blank fleet."""
        nodes = Nodes(1)
        nodes.stop()
        first = nodes.start()[0]
        assert nodes.start()[0] is first
        ask(first, "SET", "key", "value")
        nodes.stop()
        nodes.stop()
        with pytest.raises(ServerError, match="have been stopped"):
            first.start()
        with nodes.start():
            assert ask(nodes[0], "DBSIZE") == 0

    def test_several_fleets_at_once(self, make_nodes: Callable[..., Nodes]) -> None:
        """Fleets know nothing of each other: the end of one is not the end of another."""
        one, other = make_nodes(2), make_nodes(2)
        one.stop()
        assert [ask(node, "PING") for node in other] == [True, True]

    def test_forgotten_nodes_end(self) -> None:
        """A fleet that nobody refers to any more is ended by the garbage collector."""
        nodes = Nodes(1).start()
        pid, folder = nodes[0].pid, folder_of(nodes)
        del nodes
        gc.collect()
        assert has_ended(pid)
        assert not folder.exists()

    def test_settings_reach_the_server(self, make_nodes: Callable[..., Nodes]) -> None:
        """Lines of configuration are the server's, and come after ours."""
        node = make_nodes(1, settings={"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"})[0]
        assert configured(node, "maxmemory") == str(64 * 2**20)

    @pytest.mark.parametrize("password", ["secret", "ü \"x' @:/#%\\ $y"])
    def test_password(self, make_nodes: Callable[..., Nodes], password: str) -> None:
        """With a password the URL lets in and nothing else does; it is on no command line."""
        node = make_nodes(1, password=password)[0]
        assert ask(node, "PING") is True
        with (
            redis.Redis(host=node.host, port=node.port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert password not in " ".join(psutil.Process(node.pid).cmdline())
        configuration = folder_of(make_nodes(1, password=password)) / "node0" / "server.conf"
        assert stat.S_IMODE(configuration.stat().st_mode) == 0o600

    def test_nodes_that_were_never_started_have_no_urls(self) -> None:
        """An empty URL would say later, and less clearly, that the start was forgotten."""
        with pytest.raises(ServerError, match="start them first"):
            _ = Nodes(3).url

    @pytest.mark.parametrize("options", [{"count": 0}, {"appendfsync": "sometimes"}])
    def test_bad_arguments(self, options: dict[str, Any]) -> None:
        """What cannot be meant is refused before anything starts."""
        with pytest.raises(ValueError, match=r"at least one|appendfsync"):
            Nodes(**options)


class TestNode:
    """What can be done to one node of a fleet."""

    def test_any_server_can_be_a_node(self, any_server: Node) -> None:
        """Redis serves like Valkey: killed, it comes back blank on its port, as another process."""
        url, before = any_server.url, run_id(any_server)
        ask(any_server, "SET", "key", "value")
        any_server.kill()
        any_server.restart(keep_data=False)
        assert any_server.url == url
        assert run_id(any_server) != before
        assert ask(any_server, "DBSIZE") == 0

    def test_killed_node(self, nodes: Nodes) -> None:
        """A killed node is gone when `kill` returns, twice is fine, and the others go on."""
        nodes[0].kill()
        nodes[0].kill()
        assert not nodes[0].is_running
        assert has_ended(nodes[0].pid)
        with pytest.raises(redis.ConnectionError):
            ask(nodes[0], "PING")
        assert all(ask(node, "PING") for node in nodes[1:])

    def test_paused_node(self, nodes: Nodes) -> None:
        """A paused node accepts connections and answers nothing; resumed it is the same process."""
        before = run_id(nodes[0])
        nodes[0].pause()
        assert nodes[0].is_running
        with pytest.raises(redis.TimeoutError):
            ask(nodes[0], "PING")
        nodes[0].resume()
        assert run_id(nodes[0]) == before

    @pytest.mark.parametrize("end", ["stop", "kill", "pause"])
    @pytest.mark.parametrize("appendfsync", ["always", "everysec"])
    def test_restart_with_data(
        self, make_nodes: Callable[..., Nodes], appendfsync: str, end: Literal["stop", "kill", "pause"]
    ) -> None:
        """A node that writes to disk comes back with its data and another run_id, however it ended."""
        node = make_nodes(1, appendfsync=appendfsync)[0]
        url, before = node.url, run_id(node)
        ask(node, "SET", "key", "value")
        getattr(node, end)()
        node.restart(keep_data=True)
        assert ask(node, "GET", "key") == "value"
        assert node.url == url
        assert run_id(node) != before
        assert configured(node, "appendfsync") == appendfsync

    def test_blank_restart_of_a_node_that_keeps_data(self, make_nodes: Callable[..., Nodes]) -> None:
        """Blank means blank, now and at the next restart with data."""
        node = make_nodes(1, appendfsync="always")[0]
        ask(node, "SET", "key", "value")
        node.restart(keep_data=False)
        assert ask(node, "DBSIZE") == 0
        node.restart(keep_data=True)
        assert ask(node, "DBSIZE") == 0

    def test_stop_and_start_keep_what_is_on_disk(self, make_nodes: Callable[..., Nodes]) -> None:
        """`start` after `stop` brings back the data; `start` of a running node changes nothing."""
        node = make_nodes(1, appendfsync="everysec")[0]
        ask(node, "SET", "key", "value")
        node.stop()
        node.stop()
        assert not node.is_running
        node.start()
        before = node.pid
        node.start()
        assert node.pid == before
        assert ask(node, "GET", "key") == "value"

    def test_no_data_to_keep(self, nodes: Nodes) -> None:
        """A node without a disk refuses to come back with its data, and goes on running."""
        with pytest.raises(ValueError, match="appendfsync='always'"):
            nodes[0].restart(keep_data=True)
        assert ask(nodes[0], "PING") is True

    @pytest.mark.parametrize("action", ["pause", "resume"])
    def test_signals_need_a_running_node(self, nodes: Nodes, action: str) -> None:
        """Pausing a dead node is an error, not a signal to whoever has its pid now."""
        nodes[0].kill()
        with pytest.raises(ServerError, match="start it first"):
            getattr(nodes[0], action)()

    def test_the_port_of_a_dead_node_is_kept(self, make_nodes: Callable[..., Nodes]) -> None:
        """While a node is down, its port is refused to whoever asks, and not given to new nodes."""
        if sys.platform != "linux":
            pytest.skip("only Linux lets a port be reserved for a server")
        node = make_nodes(1)[0]
        node.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((node.host, node.port))

    def test_ports_are_out_of_the_way_of_outgoing_connections(self, nodes: Nodes) -> None:
        """An outgoing connection could otherwise take the port of a node that is down."""
        if len(ephemeral := embedded._ephemeral_ports()) > 50_000:
            pytest.skip(f"this machine uses the ports {ephemeral} for outgoing connections")
        assert not {node.port for node in nodes} & set(ephemeral)


class TestStart:
    """Starts that go wrong."""

    def test_servers_of_a_cluster_get_two_ports(self, make_nodes: Callable[..., Nodes]) -> None:
        """The port for its fellows exists, and is free, too: no start fails for that."""
        nodes = make_nodes(24, appendfsync=None, settings={"cluster-enabled": "yes"})
        assert all(node.port + 10_000 < 65_536 for node in nodes)

    def test_a_port_taken_in_between(
        self, make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another server that answers on the port is not mistaken for ours: the node takes another port."""
        first = make_nodes(1)[0]
        reserve = embedded._reserve_port
        lost = [socket.socket(fileno=os.dup(first._workspace._belongings.reservations[0].fileno()))]
        monkeypatch.setattr(embedded, "_reserve_port", lambda: lost.pop() if lost else reserve())
        second = make_nodes(1)[0]
        assert not lost
        assert second.port != first.port
        assert run_id(second) != run_id(first)

    def test_a_port_taken_while_the_node_was_down(
        self, make_nodes: Callable[..., Nodes], port_taker: Callable[[int], socket.socket]
    ) -> None:
        """A node never moves once its URL is known: it says who is in the way, and can come later."""
        node = make_nodes(1)[0]
        port = node.port
        node.kill()
        listener = port_taker(port)
        with pytest.raises(ServerError, match=f"port {port} is in use"):
            node.start()
        listener.close()
        node.start()
        assert node.port == port

    def test_no_such_program(self, tmp_path: Path) -> None:
        """A program that is not there, or is none, is named, with the way to get one."""
        (tmp_path / "text").write_text("hello")
        for executable in ("no-such-server", tmp_path / "nothing", tmp_path / "text"):
            with pytest.raises(ServerError, match=r"no program .*fencelock\[embedded\]"):
                Nodes(1, executable=executable)

    def test_a_program_named_by_a_relative_path(
        self, make_nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The path is meant from where the caller is, although nodes work somewhere else."""
        (tmp_path / "server").symlink_to(embedded._valkey_executable(None))
        monkeypatch.chdir(tmp_path)
        assert ask(make_nodes(1, executable="./server")[0], "PING") is True

    def test_a_program_that_cannot_run(self, tmp_path: Path) -> None:
        """The operating system's reason is passed on, and nothing stays behind."""
        program = tmp_path / "valkey-server"
        program.write_bytes(b"\0")
        program.chmod(0o755)
        with pytest.raises(ServerError, match=r"cannot be run: .*format error"):
            Nodes(1, executable=program).start()

    def test_a_refused_configuration(self) -> None:
        """The server's own words are in the error, for both kinds of server."""
        with pytest.raises(ServerError, match=r"(?s)ended while starting.*no-such-directive"):
            Nodes(2, settings={"no-such-directive": "1"}).start()
        with pytest.raises(ServerError, match=r"(?s)ended while starting.*no_such_setting"):
            Postgres(settings={"no_such_setting": "1"}).start()

    def test_a_server_that_never_answers(self, tmp_path: Path) -> None:
        """After `start_timeout` the start fails, and the process does not stay behind."""
        program = tmp_path / "valkey-server"
        program.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 600\n")
        program.chmod(0o755)
        with pytest.raises(ServerError, match=r"did not answer within 0\.5 s"):
            Nodes(1, executable=program, start_timeout=0.5).start()
        assert has_ended(int((tmp_path / "pid").read_text()))

    def test_a_dead_reaper(self, make_nodes: Callable[..., Nodes]) -> None:
        """Without a reaper nothing more is started: it could stay behind."""
        nodes = make_nodes(1)
        reaper = nodes[0]._workspace._belongings.reaper
        reaper.kill()
        reaper.wait()
        with pytest.raises(ServerError, match=r"the reaper, .*, has ended"):
            nodes[0].restart(keep_data=False)
        folder = folder_of(nodes)
        nodes.stop()
        assert not folder.exists()

    def test_nothing_is_looked_for_on_path(self, run_program: RunProgram) -> None:
        """The wheels bring all the programs that are needed."""
        program = run_program(
            "postgres = Postgres().start(); report(nodes, postgres); nodes.stop(); postgres.stop()", PATH=""
        )
        report = read_report(program)
        assert program.wait(30) == 0, program.communicate()[1]
        program.communicate()
        assert_nothing_left(report)


class TestPostgres:
    """A PostgreSQL out of a wheel."""

    def test_both_urls_lead_to_our_server(self, postgres: Postgres) -> None:
        """SQLAlchemy's URL and a bare psycopg's lead to the process that `pid` names."""
        engine = create_engine(postgres.url)
        started = "SELECT pg_read_file('postmaster.pid', 0, 100)"
        with engine.connect() as connection, psycopg.connect(postgres.dsn) as bare:
            by_url = connection.scalar(text(started))
            by_dsn = bare.execute(started).fetchone()
        engine.dispose()
        assert by_url.splitlines()[0] == str(postgres.pid)
        assert by_dsn == (by_url,)
        assert postgres.is_running

    def test_created_databases_are_empty_and_apart(self, postgres: Postgres) -> None:
        """What is created in one database does not exist in the next."""
        urls = [postgres.create_database(), postgres.create_database()]
        engines = [create_engine(url) for url in urls]
        with engines[0].begin() as connection:
            connection.execute(text("CREATE TABLE t (id int)"))
        assert [inspect(engine).get_table_names() for engine in engines] == [["t"], []]
        for engine, url in zip(engines, urls, strict=True):
            engine.dispose()
            postgres.drop_database(url)

    def test_names_of_databases(self, postgres: Postgres) -> None:
        """Any name works, unless it is taken; dropping ends open connections and may be repeated."""
        name = 'a "b"/c?d%e'
        url = postgres.create_database(name)
        with pytest.raises(psycopg.errors.DuplicateDatabase):
            postgres.create_database(name)
        with psycopg.connect(url.replace("+psycopg", "")) as connection:
            assert connection.execute("SELECT current_database()").fetchone() == (name,)
            postgres.drop_database(name)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        postgres.drop_database(url)

    def test_two_servers_at_once(self, postgres: Postgres) -> None:
        """Each has its own data, settings and end; the second is started and stopped in between."""
        other = Postgres(settings={"work_mem": "1234kB"})
        other.stop()
        with other:
            folder = folder_of(other)
            with psycopg.connect(other.dsn) as connection:
                connection.execute("CREATE TABLE only_here ()")
                assert connection.execute("SHOW work_mem").fetchone() == ("1234kB",)
            with psycopg.connect(postgres.dsn) as connection:
                assert connection.execute("SELECT to_regclass('only_here')").fetchone() == (None,)
        other.stop()
        assert has_ended(other.pid)
        assert not folder.exists()
        with psycopg.connect(postgres.dsn) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)

    def test_stop_does_not_wait_for_clients(self) -> None:
        """A stop takes the connections with it; a start after it makes an empty cluster."""
        with Postgres() as postgres:
            connection = psycopg.connect(postgres.dsn)
            connection.execute("CREATE TABLE t ()")
            connection.commit()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()
        with postgres.start(), psycopg.connect(postgres.dsn) as connection:
            assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)

    def test_it_cannot_be_reached_by_others(self, postgres: Postgres) -> None:
        """It listens on no port, and only its account may enter the folder of its socket."""
        assert not [
            one
            for one in psutil.Process(postgres.pid).net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        assert stat.S_IMODE((folder_of(postgres) / "data").stat().st_mode) == 0o700

    def test_a_server_that_was_never_started_has_no_url(self) -> None:
        """Neither a URL nor a pid is made up."""
        postgres = Postgres()
        for name in ("url", "dsn", "pid"):
            with pytest.raises(ServerError, match="start"):
                getattr(postgres, name)
        assert not postgres.is_running

    def test_awkward_temporary_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Spaces, quotes and percent signs in the path of the socket do no harm."""
        with tempfile.TemporaryDirectory(prefix="a b'\"%41") as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101, S103 - as /tmp itself is
            monkeypatch.setattr(tempfile, "tempdir", folder)
            with Postgres() as postgres, psycopg.connect(postgres.dsn) as connection:
                assert folder_of(postgres).parent == Path(folder).resolve()
                assert connection.execute("SELECT 1").fetchone() == (1,)
                engine = create_engine(postgres.url)
                engine.connect().close()
                engine.dispose()

    def test_a_temporary_folder_without_room_for_a_socket(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A socket's path is short and without commas; where the temporary folder's is not, /tmp serves."""
        for name in ("a,b", "d" * 100):
            (tmp_path / name).mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
            assert embedded._postgres_parent_folder(None) == Path("/tmp")  # noqa: S108
        with Postgres() as postgres, psycopg.connect(postgres.dsn) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)

    def test_variables_meant_for_other_servers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """PGDATA, PGPORT, PGHOST and a broken locale in the environment change nothing."""
        for name, value in {"PGDATA": "/nowhere", "PGPORT": "1", "PGHOST": "nowhere", "LC_ALL": "xx"}.items():
            monkeypatch.setenv(name, value)
        with Postgres() as postgres:
            postgres.drop_database(postgres.create_database())

    @needs_root
    def test_root_runs_it_as_nobody(self, postgres: Postgres) -> None:
        """The server has given up all of root's identity, groups included."""
        status = Path(f"/proc/{postgres.pid}/status")
        if not status.exists():
            pytest.skip("reads /proc")
        facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
        assert "0" not in [*facts["Uid"].split(), *facts["Gid"].split(), *facts["Groups"].split()]

    @needs_root
    def test_root_with_a_package_that_nobody_can_read(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It runs from a copy; the modes of the package and of the folders above it stay."""
        hidden = tmp_path / "hidden"
        hidden.mkdir(mode=0o700)
        installation = embedded._postgres_installation()
        package = installation.parent
        moved = hidden / package.name / installation.name
        shutil.copytree(installation, moved)
        if (libraries := package.with_name(f"{package.name}.libs")).exists():
            shutil.copytree(libraries, hidden / libraries.name)
        monkeypatch.setattr(embedded, "_postgres_installation", lambda: moved)
        with Postgres() as postgres, psycopg.connect(postgres.dsn) as connection:
            assert psutil.Process(postgres.pid).exe().startswith(str(folder_of(postgres)))
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
        assert (moved / "bin" / "postgres").stat().st_uid == 0


class TestEndOfTheProgram:
    """Whatever way a program ends, its servers end too, and not before."""

    @pytest.mark.parametrize(
        ("ending", "status"),
        [
            ("time.sleep(600)", -signal.SIGTERM),
            ("sys.exit(3)", 3),
            ("os._exit(4)", 4),
            ("raise RuntimeError", 1),
        ],
    )
    def test_nothing_is_left(self, run_program: RunProgram, ending: str, status: int) -> None:
        """Terminated, exited or crashed: no process and no folder stay, a paused node neither."""
        program = run_program(f"nodes[0].pause(); report(nodes); {ending}")
        report = read_report(program)
        if status < 0:
            program.send_signal(-status)
        assert program.wait(30) == status
        program.communicate()
        assert_nothing_left(report)

    def test_nothing_is_left_after_sigkill(self, run_program: RunProgram) -> None:
        """The same where the program could do nothing, for both kinds of server, busy ones included."""
        program = run_program("""
            nodes[0].pause()
            postgres = Postgres().start()
            import psycopg
            busy = psycopg.connect(postgres.dsn, autocommit=True)
            busy.pgconn.send_query(b"SELECT pg_sleep(600)")
            report(nodes, postgres)
            time.sleep(600)
        """)
        report = read_report(program)
        report["pids"] += [child.pid for child in psutil.Process(report["pids"][-1]).children()]
        program.kill()
        program.communicate()
        assert_nothing_left(report)

    def test_workers_that_live_on_do_not_keep_servers_alive(self, run_program: RunProgram) -> None:
        """A forked worker holds the pipe to the reaper open; its parent's death is noticed all the same."""
        program = run_program("""
            worker = os.fork()
            if worker == 0:
                os.close(1), os.close(2)
                time.sleep(600)
            report(nodes)
            print(worker, flush=True)
            time.sleep(600)
        """)
        report = read_report(program)
        assert program.stdout is not None
        worker = psutil.Process(int(program.stdout.readline()))
        try:
            program.kill()
            program.communicate()
            assert_nothing_left(report)
            assert worker.is_running()
        finally:
            worker.kill()

    def test_a_clean_end_does_not_wait_for_workers(self, run_program: RunProgram) -> None:
        """`stop` is over at once while a forked worker still holds the pipe to the reaper open."""
        program = run_program("""
            worker = os.fork()
            if worker == 0:
                time.sleep(600)
            report(nodes)
            begin = time.monotonic()
            nodes.stop()
            os.kill(worker, signal.SIGKILL)
            assert time.monotonic() - begin < 5
        """)
        report = read_report(program)
        errors = program.communicate()[1]
        assert program.returncode == 0, errors
        assert_nothing_left(report)

    def test_a_server_that_the_reaper_was_not_told_of(self, run_program: RunProgram) -> None:
        """A program killed between the start of a server and telling the reaper leaves nothing either."""
        program = run_program("""
            untold = subprocess.Popen(
                [nodes._settings.executable, "--port", "0", "--unixsocket", "socket", "--save", ""],
                cwd=nodes._workspace.folder / "node0", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            while not os.path.exists(nodes._workspace.folder / "node0" / "socket"):
                time.sleep(0.01)
            report(nodes)
            print(untold.pid, flush=True)
            time.sleep(600)
        """)
        report = read_report(program)
        assert program.stdout is not None
        untold = psutil.Process(int(program.stdout.readline()))
        try:
            program.kill()
            program.communicate()
            assert_nothing_left({**report, "pids": [*report["pids"], untold.pid]})
        finally:
            with suppress(psutil.NoSuchProcess):
                untold.kill()

    @pytest.mark.parametrize("leave", ["sys.exit()", "os._exit(0)"])
    def test_a_forked_child_ends_nothing(self, run_program: RunProgram, leave: str) -> None:
        """A child may use the servers and leave as it likes; it is refused what would act on them."""
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
                import redis
                assert redis.Redis.from_url(nodes[0].url).ping()
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
        """)
        report = read_report(program)
        errors = program.communicate()[1]
        assert program.returncode == 0, errors
        assert errors == ""
        assert_nothing_left(report)

    def test_ctrl_c_reaches_the_program_only(self, run_program: RunProgram) -> None:
        """Servers and reapers are in other sessions, and the program's own signal handling stays."""
        program = run_program("""
            postgres = Postgres().start()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            report(nodes, postgres)
            time.sleep(600)
        """)
        report = read_report(program)
        sessions = {os.getsid(pid) for pid in [*report["pids"], *report["reapers"]]}
        assert os.getsid(program.pid) not in sessions
        for reaper in report["reapers"]:
            os.kill(reaper, signal.SIGTERM)  # as a service manager does, to all at once
        program.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in program.communicate()[1]
        assert_nothing_left(report)


class TestFixtures:
    """What the other tests rely on."""

    @pytest.mark.parametrize("round_", [1, 2])
    def test_nodes_are_blank_whatever_the_last_test_did(self, nodes: Nodes, round_: int) -> None:
        """Killed, paused and filled nodes come back running and blank, with no scripts."""
        digest = "e0e1f9fabfc9d4800c877a703b823ac0578ff8db"  # of `return 1`
        assert [ask(node, "DBSIZE") for node in nodes] == [0] * 5, round_
        assert not any(ask(node, "SCRIPT", "EXISTS", digest)[0] for node in nodes)
        for node in nodes:
            ask(node, "SET", "key", "value")
            assert ask(node, "SCRIPT", "LOAD", "return 1") == digest
        nodes[0].kill()
        nodes[1].pause()

    @pytest.fixture
    def late_cleanup(self) -> Iterator[ExitStack]:
        """Runs after the fixtures that are named behind it."""
        with ExitStack() as stack:
            yield stack

    @pytest.mark.parametrize("round_", [1, 2])
    def test_each_test_has_an_empty_database(
        self, late_cleanup: ExitStack, engine: Engine, round_: int
    ) -> None:
        """What a test has created and left locked, the next one does not see, on any database."""
        assert inspect(engine).get_table_names() == [], round_
        leftover = engine.connect()
        late_cleanup.callback(leftover.invalidate)
        leftover.execute(text("CREATE TABLE t (id int)"))
        if engine.dialect.name == "postgresql":
            leftover.execute(text("CREATE SCHEMA other CREATE TABLE u ()"))
        leftover.commit()
        leftover.execute(text("SELECT * FROM t"))


def test_a_node_comes_back_with_an_older_copy_of_its_data(make_nodes: Callable[..., Nodes]) -> None:
    """What was written after the copy is gone; what runs is another process at the same address."""
    (node,) = make_nodes(1, appendfsync="everysec")
    with tempfile.TemporaryDirectory() as folder, redis.Redis.from_url(node.url) as client:
        client.set("early", "1")
        node.copy_data(f"{folder}/copy")
        client.set("late", "1")
        pid, url = node.pid, node.url
        node.roll_back(f"{folder}/copy")
        assert (node.pid != pid, node.url) == (True, url)
    with redis.Redis.from_url(node.url) as client:
        assert client.keys() == [b"early"]


def test_a_copy_is_whole_while_the_node_rewrites_its_files(
    make_nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    """Whatever moment it is taken at, a node starts from it with all that had been written before."""
    (node,) = make_nodes(1, appendfsync="always")
    for number in range(5):
        with redis.Redis.from_url(node.url) as client:
            client.set(f"key{number}", "x" * 100_000)
            client.bgrewriteaof()
            node.copy_data(tmp_path / str(number))
        node.roll_back(tmp_path / str(number))
        with redis.Redis.from_url(node.url) as client:
            assert client.dbsize() == number + 1


def test_a_node_that_keeps_nothing_cannot_be_rolled_back(nodes: Nodes, tmp_path: Path) -> None:
    """It says how to make one that can."""
    for act in (nodes[0].copy_data, nodes[0].roll_back):
        with pytest.raises(ValueError, match="appendfsync='always'"):
            act(tmp_path / "copy")
    assert nodes[0].is_running
