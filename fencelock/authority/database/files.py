"""The file that stores the leases of an SQLite database."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import DisconnectionError

from fencelock._engines import shown
from fencelock._process import in_forked_child
from fencelock.errors import AuthorityError

#: The folder of the lease files for databases in memory, if this process has made one.
_folder: list[Path] = []
_of_engines: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()
_NUMBER: Final = "fencelock.file"


def file_of(url: URL, engine: object) -> URL:
    """Return the URL of the file of leases: beside the database, or temporary if it is in memory."""
    path = url.database or ""
    if not path or ":memory:" in path or url.query.get("mode") == "memory":
        return url.set(database=_temporary(engine), query={})
    if path.startswith("file:"):
        raise ValueError(f"leases need a plain path such as sqlite:///app.db, not {shown(url)}")
    return url.set(database=f"{Path(path).resolve()}-leases", query={})


def _temporary(engine: object) -> str:
    if not _folder:
        _folder.append(Path(tempfile.mkdtemp(prefix="fencelock-")))
    if not isinstance(engine, Engine):
        return str(_folder[0] / "memory-leases")
    if engine not in _of_engines:
        _of_engines[engine] = str(_folder[0] / f"memory-{len(_of_engines)}-leases")
    return _of_engines[engine]


@atexit.register
def _remove() -> None:
    for folder in _folder:
        shutil.rmtree(folder, ignore_errors=True)


in_forked_child(_folder.clear)  # the parent removes its folder


def make_before_connecting(engine: Engine) -> None:
    """Make the file before each connection; call this once for an engine: its pools share the listener."""
    path = engine.url.database or ""
    event.listen(engine, "do_connect", lambda *_: _make_file(path))


def watch_file(engine: Engine) -> None:
    """Make a pool reconnect after its file was deleted or replaced: other processes use the new file."""
    path = engine.url.database or ""

    def note(_connection: object, record: Any) -> None:
        record.info[_NUMBER] = _number_of(path)

    def check(_connection: object, record: Any, _lent: object) -> None:
        if record.info.get(_NUMBER) != _number_of(path):  # an open connection would keep using the old file
            raise DisconnectionError

    def roll_back(connection: Any, _record: object) -> None:
        with suppress(Exception):
            connection.rollback()  # an open cursor would keep the file locked

    event.listen(engine.pool, "connect", note)
    if not engine.dialect.is_async:
        event.listen(engine.pool, "close", roll_back)
    event.listen(engine.pool, "checkout", check)


def _make_file(path: str) -> None:
    """Make a missing file with its database's mode and, if possible, owner: it names locks and holders."""
    if Path(path).is_symlink():  # which another user of the folder may have made
        raise AuthorityError(
            f"{path} is a symbolic link, and the leases need a file of their own: delete the link"
        )
    if not hasattr(os, "fchown"):  # Windows, where a file has the rights of its folder
        return
    with suppress(OSError):  # SQLite reports the error, or makes the file itself
        its = Path(path.removesuffix("-leases")).stat()
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, its.st_mode & 0o666)
        try:
            os.fchmod(made, its.st_mode & 0o666)
            os.fchown(made, its.st_uid, its.st_gid)
        finally:
            os.close(made)


def _number_of(path: str) -> tuple[int, int] | None:
    try:
        its = os.stat(path)  # noqa: PTH116 - called for each lock
    except OSError:
        return None
    return its.st_dev, its.st_ino
