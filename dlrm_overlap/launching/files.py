"""Files that are whole or not there, files that are none, and folders that one process at a time writes to."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")

LOCK_NAME = ".lock"
_GIVE_UP_S = 0.5  # a look at a lock, by `check_free`, holds it for some microseconds
# What a file system without locks answers, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_FILES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """Open the regular file `path`, or one that it links to, for reading.

    Whoever opens a pipe that nobody writes to waits for ever, and some devices never end.

    Raises:
        OSError: if it cannot be read, or is no file.
    """
    if kind := _NO_FILES.get(stat.S_IFMT(path.stat().st_mode)):
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    return path.open("rb")


def read_file(path: Path) -> bytes:
    """Return what is in the regular file `path`; raises what `open_file` does."""
    with open_file(path) as stream:
        return stream.read()


@contextmanager
def hold_folder(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock of `folder`, which must exist, while the block runs.

    The lock is the kernel's (flock) on the file `.lock`, in which the owner's host and process id are written for
    others to read. It ends with its owner, however that ends, so a dead owner blocks nobody: its file may stay, and is
    taken over. Forked children do not hold it.

    On NFS, Linux turns it into a lock that the server keeps and all clients see, and that ends when the owner's host
    closes the file or loses its lease; on a mount with `nolock` or `local_lock` it is seen on this host alone. Where
    the file system has no locks at all, a warning says so, and the block runs without one.

    Args:
        folder: the folder.
        key: the option that names the folder, for the error.

    Yields:
        Whether the lock is held: False where there are none.

    Raises:
        InputError: if another process holds it; the error names that process and its host.
        OSError: if the file cannot be made.
    """
    held = _Lock(folder / LOCK_NAME, key)
    try:
        yield held.is_locked
    finally:
        held.release()


def check_free(folder: Path, key: str) -> None:
    """Check that no process holds the lock of `folder`, which need not exist; any number of processes may look at once.

    Raises:
        InputError: as `hold_folder` does.
    """
    path = folder / LOCK_NAME
    try:
        with open_file(path) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, key) from None
    except OSError:
        return  # there is none, or this file system has none, or it cannot be read: holding it tells


class _Lock:
    """The lock of one folder, held from when it is built until `release`."""

    def __init__(self, path: Path, key: str) -> None:
        self.is_locked = True
        self._path = path
        self._file: int | None = None
        deadline = time.monotonic() + _GIVE_UP_S
        while self._file is None:
            # Not through a link, which whoever may write to the folder could lead to any file of this user.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):  # else its owner removed it between the two calls above
                    self._file, file = file, None
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _in_use(path, key) from None
                time.sleep(_GIVE_UP_S / 50)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                log.warning("%s: the file system has no locks, so nothing keeps another process out", path.parent)
                self.is_locked = False
                return
            finally:
                if file is not None:
                    os.close(file)
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        if os.fstat(self._file).st_nlink == 1:  # else it is another file's second name
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, json.dumps(owner).encode(), 0)
        # A forked reader would hold the lock as long as it lives, which may be longer than its parent does.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (lock := this()) and lock._close())

    def release(self) -> None:
        """Remove the file and end the lock, in this order, so that nobody finds a file that is about to go."""
        if self._file is not None and _is_at(self._file, self._path):
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


def _is_at(file: int, path: Path) -> bool:
    """Return whether the open `file` is the one that lies at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _in_use(path: Path, key: str) -> InputError:
    try:
        owner = json.loads(read_file(path))
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # its owner is about to write it
        who = "another process"
    return InputError(f"{key}: {path.parent} is in use by {who}; wait until it ends, or give another folder")


def temporary_of(file: Path) -> Path:
    """Return a name beside `file` that nobody can have taken or linked before: a part of it is random.

    Open it by "x", which neither follows a link nor takes a file that is there.
    """
    return file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, which replaces `file` when the block ends without an error and all is on disk.

    `remove_temporaries` removes what a killed process has left.
    """
    temporary = temporary_of(file)
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
        sync_folder(file.parent)  # or else a power cut could undo this renaming and keep a later one
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any, key: str) -> None:
    """Write `content` to `path`, whole or not at all.

    Raises:
        InputError: naming `key`, the option that names the file, if it cannot be written.
    """
    try:
        with replacing(path) as stream:
            stream.write((json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be written ({error.strerror}); name another file") from None


def sync_folder(folder: Path) -> None:
    """Make what was created or renamed in `folder` last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes have left of files that were to be replaced. Hold the folder's lock meanwhile."""
    for file in folder.glob(".*.tmp"):
        file.unlink(missing_ok=True)
