"""Directories that are there as a whole or not at all: written beside their place, and put into it by a rename.

    with replacing(directory) as new: ...      the old one until the block ends well, the new one from then on
    with adding(directory) as new: ...         the same, but who comes second leaves what is there
    with resuming(directory) as new: ...       the same as `replacing`, but what was written before a failure stays
    recover(directory)                         what an interruption between two renames has left apart
    write_text(path, text)                     a small file, on the disk when this returns

The directory that is written is locked as long as its process lives. What a killed one has left is not, and is removed
by the next that writes to the same place.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from olq_fx.errors import SaveError

_PARTIAL, _OLD, _UNFINISHED = ".partial", ".old", ".unfinished"
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""


@contextlib.contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Write a directory that takes the place of another one, or of none.

    Args:
        directory: its final place.

    Yields:
        Where to write. When the block raises, it is removed and nothing has changed.

    Raises:
        SaveError: the disk is full, say.
    """
    with _written(directory) as new:
        yield new
        with _errors(directory):
            sync(new)
            _put(new, directory)
            sync(directory.parent)


@contextlib.contextmanager
def adding(directory: Path) -> Iterator[Path]:
    """The same, but where a directory is there by the end, that one stays and the new one is removed."""
    with _written(directory) as new:
        yield new
        with _errors(directory):
            sync(new)
            try:
                new.rename(directory)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES) or not directory.is_dir():
                    raise
            sync(directory.parent)


@contextlib.contextmanager
def resuming(directory: Path) -> Iterator[Path]:
    """The same as `replacing`, but when the block raises, or the process is killed, what it has written stays.

    Yields:
        Where to write: always the same place, with what an interrupted run has left there.

    Raises:
        SaveError: another process writes there, or the disk is full, say.
    """
    new = directory.parent / f".{directory.name}{_UNFINISHED}"
    with _errors(directory):
        recover(directory)
        new.mkdir(parents=True, exist_ok=True)
    with locked(new) as free:
        if not free:
            raise SaveError(f"{directory} is being written by another process")
        yield new
        with _errors(directory):
            sync(new)
            _put(new, directory)
            sync(directory.parent)
        shutil.rmtree(new, ignore_errors=True)  # after an exchange the old directory has this name


@contextlib.contextmanager
def _written(directory: Path) -> Iterator[Path]:
    with _errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        recover(directory)
        _sweep(directory)
        new = directory.parent / f".{directory.name}.{uuid.uuid4().hex}{_PARTIAL}"
        new.mkdir()
    try:
        with locked(new):
            yield new
    finally:
        # After an exchange the old directory has this name.
        shutil.rmtree(new, ignore_errors=True)


@contextlib.contextmanager
def _errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(f"{directory} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold a directory for this process, where the system can.

    Yields:
        False if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def recover(directory: Path) -> None:
    """Put a directory back that was on its way out when its process was killed, and no other had taken its place."""
    if directory.exists():
        return
    for old in sorted(_beside(directory, _OLD)):
        with contextlib.suppress(OSError):  # another process does the same
            old.rename(directory)
            return


def _sweep(directory: Path) -> None:
    """Remove what processes that are no more have left."""
    for left in [*_beside(directory, _PARTIAL), *_beside(directory, _OLD)]:
        with contextlib.suppress(OSError), locked(left) as free:
            if free and _can_lock():
                shutil.rmtree(left, ignore_errors=True)


def _can_lock() -> bool:
    return sys.platform != "win32"


def _beside(directory: Path, ending: str) -> list[Path]:
    start = f".{directory.name}."
    if not directory.parent.is_dir():
        return []
    own = len(start) + 32 + len(ending)
    return [
        other
        for other in directory.parent.iterdir()
        if other.name.startswith(start) and other.name.endswith(ending) and len(other.name) == own
    ]


def _put(new: Path, directory: Path) -> None:
    """Put a directory into its place; one that is there goes where the new one was, or away."""
    if not directory.exists():
        new.rename(directory)
    elif not _exchange(new, directory):
        old = new.with_suffix(_OLD)
        directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories at once, where the system can; whether it could."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number))


def sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    if sys.platform == "win32":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a small file; it is on the disk when this returns.

    Raises:
        SaveError: the disk is full, say.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SaveError(f"{path.name} cannot be written: {error.strerror or error}") from error


def remove(directory: Path) -> None:
    """Take a directory away at once, then delete it: nobody sees it half."""
    old = directory.parent / f".{directory.name}.{uuid.uuid4().hex}{_PARTIAL}"
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        directory.rename(old)
    shutil.rmtree(old, ignore_errors=True)
