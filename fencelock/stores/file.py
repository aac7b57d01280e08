"""A file that refuses stale writers, for processes of one POSIX machine.

Each version is a separate file in a folder, named by its token. A crash leaves the old or the new version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fencelock._process import in_forked_child
from fencelock.errors import StaleTokenError
from fencelock.lease import assert_held, check_resource
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
        folder: a folder that has only the versions; the first `write` creates it.
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
        """Return the newest version; None if nothing was written yet."""
        while (newest := self._newest()) is not None:
            with suppress(FileNotFoundError):  # a writer has removed this version after writing a newer one
                content = (self._folder / newest).read_bytes()
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
        """
        if not isinstance(content, bytes):
            raise TypeError(f"a fenced file has bytes, not {type(content).__name__}: encode it")
        chosen = assert_held(self._resource)._token_to_write() if token is None else check_token(token)
        version = f"{chosen:0{_DIGITS}}"
        with self._locked():
            newest = self._newest()
            if newest is not None and newest > version:
                raise StaleTokenError(str(self._folder), None, chosen, int(newest), detail=_REFUSED)
            new = self._folder / "new"  # a file "new" that a crash has left is overwritten
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._folder / version)
            _sync(self._folder)
            for name in set(self._versions()) - {version}:
                (self._folder / name).unlink()

    def _versions(self) -> list[str]:
        paths = self._folder.iterdir() if self._folder.exists() else ()
        return [path.name for path in paths if _VERSION.fullmatch(path.name)]

    def _newest(self) -> str | None:
        return max(self._versions(), default=None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Create the folder if it is missing, and lock it against other writers."""
        import fcntl  # noqa: PLC0415 - Windows has no fcntl, but can read

        with suppress(FileExistsError):
            self._folder.mkdir()
            _sync(self._folder.parent)
        folder = os.open(self._folder, os.O_RDONLY)
        _locked.add(folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            if folder in _locked:  # else this is a forked child
                fcntl.flock(folder, fcntl.LOCK_UN)
                _locked.remove(folder)
                os.close(folder)


_locked: Final[set[int]] = set()
"""The descriptors of locked folders. A forked child has copies, and each keeps the lock of its parent."""


def _close_copies() -> None:
    while _locked:
        os.close(_locked.pop())


in_forked_child(_close_copies)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
