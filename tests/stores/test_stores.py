"""A store of fenced values outside of the database refuses a stale writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from fencelock import Lease, LockLostError, NotHeldError, StaleTokenError
from fencelock.integrations import header
from fencelock.lease import holding
from fencelock.stores import file
from fencelock.stores.file import FencedFile
from fencelock.stores.redis import AsyncFencedValue, FencedValue
from fencelock.tokens import MAX_TOKEN
from proof.servers import Nodes
from tests.loops import in_loop
from tests.programs import printed
from tests.stores.kinds import RESOURCE, Store, store_at

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=["redis", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        nodes: Nodes = request.getfixturevalue("nodes")
        return f"redis {nodes[0].url}"
    return f"file {tmp_path / 'report'}"


@pytest.fixture
def store(place: str) -> Store:
    return store_at(place)


def test_a_stale_writer_is_refused(store: Store) -> None:
    assert store.read() is None
    for token, content in ((7, b"a"), (7, b"b"), (9, b"c")):
        store.write(content, token=token)
        assert store.read() == content
    with pytest.raises(
        StaleTokenError, match=r"token 8 is stale: .* has been fenced with 9; .*nothing was written"
    ) as caught:
        store.write(b"late", token=8)
    assert (caught.value.token, caught.value.current, caught.value.written) == (8, 9, False)
    assert store.read() == b"c"


def test_tokens_compare_as_numbers(store: Store) -> None:
    for token in (10, 1000, 2**53 + 1, MAX_TOKEN):
        store.write(b"old", token=token - 1)
        store.write(b"%d" % token, token=token)
        with pytest.raises(StaleTokenError):
            store.write(b"late", token=token - 1)
        assert store.read() == b"%d" % token


def test_the_held_token_is_the_default(store: Store) -> None:
    with pytest.raises(NotHeldError, match=RESOURCE):
        store.write(b"x")
    with holding([Lease("another", 9)]), pytest.raises(NotHeldError, match=RESOURCE):
        store.write(b"x")
    with holding([Lease(RESOURCE, 9, expires_at=time.monotonic() - 1)]), pytest.raises(LockLostError):
        store.write(b"x")
    assert store.read() is None
    with header.bound(f"{RESOURCE}=9"):
        store.write(b"y")
    with pytest.raises(StaleTokenError), header.bound(f"{RESOURCE}=8"):
        store.write(b"z")
    assert store.read() == b"y"


def test_what_is_no_token_is_refused_and_any_bytes_come_back(store: Store) -> None:
    wrong: Any
    for wrong, error in ((0, ValueError), (MAX_TOKEN + 1, ValueError), ("7", TypeError), (True, TypeError)):
        with pytest.raises(error):
            store.write(b"x", token=wrong)
    assert store.read() is None
    for content in (b"", b"\0\r\n\xff", b"x" * 1_000_000):
        store.write(content, token=1)
        assert store.read() == content


def race(place: str, count: int, processes: int) -> list[str]:
    command = [sys.executable, "-m", "tests.stores.kinds", place]
    racers = [
        subprocess.Popen([*command, str(seed), str(count)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for seed in range(4 - processes, 4)
    ]
    said = [racer.communicate(timeout=100)[1] for racer in racers]
    return [text for racer, text in zip(racers, said, strict=True) if racer.returncode]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_race(place: str, processes: int) -> None:
    assert race(place, 150, processes) == []
    assert store_at(place).read() == b"600"


@pytest.mark.long
def test_processes_race_without_the_check(place: str) -> None:
    """The control: in the same race older values do come back."""
    complaints = race(f"naive-{place}", 150, 4)
    assert any("is lost" in text or "an older value is back" in text for text in complaints), complaints


@in_loop
async def test_a_value_for_asyncio(nodes: Nodes) -> None:
    async with redis.asyncio.Redis.from_url(nodes[0].url) as client:
        value = AsyncFencedValue(client, RESOURCE)
        assert await value.get() is None
        await value.set(b"a", token=7)
        with header.bound(f"{RESOURCE}=8"):
            await value.set("b")
        with pytest.raises(StaleTokenError):
            await value.set(b"late", token=7)
        assert await value.get() == b"b"
    with redis.Redis.from_url(nodes[0].url, decode_responses=True) as decoding:
        same = FencedValue(decoding, RESOURCE)
        assert same.get() == "b"
        with pytest.raises(StaleTokenError, match="fenced with 8"):
            same.set("late", token=7)


def test_a_key_of_another_program_is_refused(nodes: Nodes) -> None:
    with redis.Redis.from_url(nodes[0].url) as client:
        client.set("a key", "x")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            FencedValue(client, "a key").set(b"y", token=1)
        assert client.get("a key") == b"x"


def test_a_file_has_bytes(tmp_path: Path) -> None:
    """A text would need an encoding."""
    with pytest.raises(TypeError, match="not str: encode it"):
        FencedFile(tmp_path / "report").write("text", token=1)  # type: ignore[arg-type]
    assert not (tmp_path / "report").exists()
    (tmp_path / "old").write_text("a file")
    with pytest.raises(NotADirectoryError, match="a FencedFile is a folder"):
        FencedFile(tmp_path / "old")


def test_names_of_folders_at_their_limits(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127, "a b;c=%"):
        file = FencedFile(tmp_path / name)
        with holding([Lease(name, 3)]):
            file.write(b"x")
        assert file.read() == b"x"
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [f"{3:019}", "lock"]


#: For each call into the system that changes something, and each side of it: a process that is killed there.
KILLED = """
import json, os, signal, sys
from fencelock.stores.file import FencedFile

def killing(function, number, *, before):
    def call(*arguments, **more):
        calls.append(function.__name__)
        if before and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **more)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

results, number = [], 0
while not results or results[-1]["killed"]:
    number += 1
    for before in (True, False):
        file = FencedFile(f"report{number}{before}")
        file.write(b"old" * 1000, token=1)
        if not (child := os.fork()):
            calls = []
            for name in ("fsync", "replace", "unlink"):
                setattr(os, name, killing(getattr(os, name), number, before=before))
            file.write(b"new" * 1000, token=2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = file.read()[:3].decode()
        file.write(b"next", token=3)
        left = sorted(os.listdir(f"report{number}{before}"))
        killed, then = os.WIFSIGNALED(status), file.read().decode()
        results.append({"killed": killed, "found": found, "next": then, "left": left})
print(json.dumps(results))
"""


def test_a_crash_leaves_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    results = json.loads(printed("-c", KILLED, cwd=tmp_path))
    found = [result["found"] for result in results]
    assert found == ["old"] * 3 + ["new"] * (len(found) - 3)  # fsync, fsync, before the renaming; behind it
    assert [result["killed"] for result in results] == [True] * 8 + [False] * 2
    assert all((result["next"], result["left"]) == ("next", [f"{3:019}", "lock"]) for result in results)


def test_a_forked_child_keeps_no_folder_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has copies of the descriptors, and a lock lasts as long as one of them is open."""
    fenced, fsync, (reader, writer), children = (
        FencedFile(tmp_path / "f", resource="f"),
        os.fsync,
        os.pipe(),
        [],
    )
    fenced.write(b"one", token=1)

    def fork_on_a_full_disk(_descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        child = os.fork()
        if not child:
            os.read(reader, 1)  # until the parent has looked
            os._exit(0)
        children.append(child)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fork_on_a_full_disk)
    with pytest.raises(OSError, match="No space"):
        fenced.write(b"two", token=2)
    folder = os.open(tmp_path / "f", os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    fenced.write(b"three", token=3)
    os.write(writer, b".")
    os.waitpid(children[0], 0)
    os.close(reader)
    os.close(writer)
    assert fenced.read() == b"three"


def test_what_a_child_closes_does_not_unlock_the_folder_of_its_parent(tmp_path: Path) -> None:
    fenced = FencedFile(tmp_path / "f", resource="f")
    fenced.write(b"one", token=1)
    lock = os.open(tmp_path / "f" / "lock", os.O_RDWR)
    with fenced._locked():
        child = os.fork()
        if not child:
            os._exit(len(file._opened))
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def test_a_fenced_file_follows_no_link(tmp_path: Path) -> None:
    """Another user may have put one where the next version is written, or in place of the folder."""
    victim, folder = tmp_path / "victim", tmp_path / "report"
    victim.write_bytes(b"another file")
    FencedFile(folder).write(b"1", token=1)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "new").symlink_to(victim)
    FencedFile(folder).write(b"2", token=2)
    assert (FencedFile(folder).read(), victim.read_bytes()) == (b"2", b"another file")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        FencedFile(tmp_path / "link").write(b"3", token=3)
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        FencedFile(tmp_path / "link").read()
    (folder / f"{8:019}").symlink_to(victim)
    (folder / f"{9:019}").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / f"{7:019}")
    assert FencedFile(folder).read() == b"2"
    FencedFile(folder).write(b"3", token=3)
    assert (FencedFile(folder).read(), victim.read_bytes()) == (b"3", b"another file")


def test_a_fenced_file_is_not_closed_or_stopped_by_others(tmp_path: Path) -> None:
    """By a version that no token has, and by the lock of a user that may only read the folder."""
    folder = tmp_path / "report"
    FencedFile(folder).write(b"1", token=1)
    (folder / f"{1:019}").chmod(0o640)
    (folder / ("9" * 19)).write_bytes(b"bait")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        FencedFile(folder).write(b"2", token=2)
    finally:
        os.close(descriptor)
    assert FencedFile(folder).read() == b"2"
    assert (folder / f"{2:019}").stat().st_mode & 0o777 == 0o640
    assert (folder / "lock").stat().st_mode & 0o077 == 0


def test_a_fenced_file_is_in_no_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="all users can write there"):
        FencedFile(folder).write(b"1", token=1)
    folder.chmod(0o700)
    FencedFile(folder).write(b"1", token=1)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(PermissionError, match="belongs to another user"):
            FencedFile(folder).write(b"2", token=2)
