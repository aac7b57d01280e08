"""A file that refuses stale writers, for processes of one POSIX machine.

Each version is a separate file in a folder, named by its token. A crash leaves the old or the new version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from fencelock._process import in_forked_child
from fencelock.errors import StaleTokenError
from fencelock.lease import assert_held, check_resource
from fencelock.tokens import MAX_TOKEN
from fencelock.tokens import check as check_token

_DIGITS: Final = 19
_REFUSED: Final = "nothing was written"
_VERSION: Final = re.compile(rf"[0-9]{{{_DIGITS}}}")


class FencedFile:
    """A file that refuses a write if its last version has a larger token; a read compares nothing.

    ```python
    report = FencedFile("report")
    with fenced_lock("report"):
        report.write(b"42")
    report.read()                                # b"42"
    ```

    Args:
        folder: a folder of its own; the first `write` creates it, with rights for this user only.
        resource: the resource whose lock guards the file; by default the name of the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resource: str | None = None) -> None:
        self._folder = Path(folder)
        if self._folder.is_file():
            raise NotADirectoryError(
                f"{folder} is a file, and a FencedFile is a folder, with a file a version"
            )
        self._resource = check_resource(self._folder.name if resource is None else resource)

    def read(self) -> bytes | None:
        """Return the newest version; None if nothing was written yet.

        Raises:
            NotADirectoryError: the folder is a symbolic link.
            OSError: the version cannot be read.
        """
        self._refuse_link()
        while (newest := self._newest()) is not None:
            with suppress(FileNotFoundError):  # a writer has removed this version after writing a newer one
                with open(self._folder / newest, "rb", opener=_open_file) as file:
                    content = file.read()
                if newest == self._newest():
                    return content
        return None

    def write(self, content: bytes, *, token: int | None = None) -> None:
        """Replace the content on the disk; by default with the token of the lease held.

        Raises:
            StaleTokenError: a version has a larger token.
            NotHeldError: the lock is not held.
            LockLostError, CommitInDoubtError: as for other writes under the lease.
            TypeError, ValueError: for a bad argument.
            PermissionError: the folder belongs to another user, or all users can write there.
            NotADirectoryError: the folder is a symbolic link.
        """
        if not isinstance(content, bytes):
            raise TypeError(f"a fenced file has bytes, not {type(content).__name__}: encode it")
        chosen = assert_held(self._resource)._token_to_write() if token is None else check_token(token)
        version = f"{chosen:0{_DIGITS}}"
        with self._locked() as folder:
            newest = self._newest()
            if newest is not None and newest > version:
                raise StaleTokenError(str(self._folder), None, chosen, int(newest), detail=_REFUSED)
            if any(path.name == "new" for path in self._folder.iterdir()):  # a crash has left it
                os.unlink("new", dir_fd=folder)
            with open("new", "xb", opener=partial(_open_in, folder)) as file:
                if newest is not None:
                    os.fchmod(file.fileno(), os.lstat(newest, dir_fd=folder).st_mode & 0o777)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace("new", version, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
            for name in set(self._versions()) - {version}:
                os.unlink(name, dir_fd=folder)

    def _versions(self) -> list[str]:
        entries = os.scandir(self._folder) if self._folder.exists() else ()
        names = [each.name for each in entries if each.is_file(follow_symlinks=False)]
        return [name for name in names if _VERSION.fullmatch(name) and int(name) <= MAX_TOKEN]

    def _newest(self) -> str | None:
        return max(self._versions(), default=None)

    def _refuse_link(self) -> None:
        if self._folder.is_symlink():
            raise NotADirectoryError(f"{self._folder} is a symbolic link: name the folder itself")

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Create the folder if it is missing, and lock it against other writers; yield its descriptor."""
        import fcntl  # noqa: PLC0415 - Windows has no fcntl, but can read

        self._refuse_link()
        with suppress(FileExistsError):
            self._folder.mkdir(0o700)
            _sync(self._folder.parent)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        _opened.add(folder)
        try:
            found = os.fstat(folder)
            if found.st_uid not in {0, os.geteuid()} or found.st_mode & 0o002:
                raise PermissionError(
                    f"{self._folder} belongs to another user, or all users can write there: use a folder of "
                    "your own"
                )
            # A file that only writers can open; each reader could lock the folder itself.
            lock = _open_in(folder, "lock", os.O_RDWR | os.O_CREAT, 0o600 | found.st_mode & 0o060)
            _opened.add(lock)
            try:
                if os.fstat(lock).st_uid == os.geteuid():  # whatever the umask has left
                    os.fchmod(lock, 0o600 | found.st_mode & 0o060)
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield folder
            finally:
                if lock in _opened:  # else this is a forked child
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    _close(lock)
        finally:
            _close(folder)


def _open_file(path: str, flags: int) -> int:
    """Open a file that has replaced no link, and wait for no writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _open_in(folder: int, name: str, flags: int, mode: int = 0o666) -> int:
    """Open a file in a folder, and follow no link."""
    return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder)


_opened: Final[set[int]] = set()
"""The descriptors of folders and locks. A forked child has copies, and each keeps the lock of its parent."""


def _close(descriptor: int) -> None:
    if descriptor in _opened:
        _opened.remove(descriptor)
        os.close(descriptor)


def _close_copies() -> None:
    while _opened:
        os.close(_opened.pop())


in_forked_child(_close_copies)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
