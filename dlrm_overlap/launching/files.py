"""Files that are written completely or not at all, and locked folders."""

import contextlib
import errno
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from dlrm_overlap.config import InputError

log = logging.getLogger("dlrm_overlap")

LOCK_NAME = ".lock"
PARTIAL = ".partial_"  # prefix of a folder that is being written or removed
_RANDOM_BYTES = 8
_TEMPORARIES = f".*.{'[0-9a-f]' * 2 * _RANDOM_BYTES}.tmp"
_OWNER_CHARACTERS = 200
_LOCK_TIMEOUT_S = 0.5  # the owner may be about to end
# Errors on a file system without locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """Open the regular file `path` for reading. Raises OSError for other kinds, without waiting for a pipe's writer."""

    def fail_unless_regular(mode: int) -> None:
        if kind := _KINDS.get(stat.S_IFMT(mode)):
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))

    fail_unless_regular(os.stat(path).st_mode)  # before opening, which can have effects on a device
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - the caller closes it
    try:
        fail_unless_regular(os.fstat(file.fileno()).st_mode)  # the path may have been replaced in between
    except OSError:
        file.close()
        raise
    return file


def discard(path: Path) -> None:
    """Remove a file, a link (not its target), or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard_at_once(path: Path) -> None:
    """Rename `path`, so that no reader finds it, then remove it; what is left of it is for `discard_partial`."""
    names = (path.with_name(f"{PARTIAL}removed_{path.name}_{number}") for number in itertools.count())
    removed = next(name for name in names if not os.path.lexists(name))
    os.replace(path, removed)
    with suppress(OSError):  # such as a file on NFS that a reader has open
        discard(removed)


def discard_partial(folder: Path, needed: Path | None = None) -> None:
    """Remove what interrupted writes have left in `folder`; raise an OSError only if `needed` cannot be removed."""
    for left in folder.glob(f"{PARTIAL}*"):
        with suppress(OSError) if left != needed else nullcontext():
            discard(left)


def make_folder(folder: Path, key: str = "log.dir") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # If a link's target is missing, mkdir says "File exists".
        links = (each for each in (folder, *folder.parents) if os.path.islink(each) and not os.path.exists(each))
        reason = next((f"{link} is a link to what is not there" for link in links), error.strerror)
        raise InputError(
            f"{key}: {folder} cannot be created ({reason}); give a folder that can be written to"
        ) from None


@contextmanager
def hold_folder(folder: Path, key: str) -> Iterator[bool]:
    """Hold the lock of `folder` during the block, and yield whether it is held.

    The lock is a flock on the file `.lock`; it ends with this process, and forked children do not hold it. If the file
    system has no locks, a warning is logged. If another process holds the lock, an `InputError` names this process, and
    the option `key`.
    """
    path = folder / LOCK_NAME
    try:
        lock = _acquire(path, key)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s: the file system has no locks, so nothing keeps another process out", folder)
        yield False
        return
    locked = path.stat()
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # the disk may be full; the lock holds anyway
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        yield True
    finally:
        with contextlib.suppress(OSError):
            if os.path.samestat(locked, path.stat()):  # else the folder was replaced, and has another lock file
                path.unlink()  # while it is held: a waiting process then creates a new file
        lock.release()


def _acquire(path: Path, key: str) -> FileLock:
    lock = FileLock(path, timeout=_LOCK_TIMEOUT_S, poll_interval=_LOCK_TIMEOUT_S / 50, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        who = ""
        with contextlib.suppress(OSError):  # the owner has just ended
            who = path.read_text(errors="replace")[:_OWNER_CHARACTERS]
        who = who or "another process"
        cure = "wait until it ends, or give another folder"
        raise InputError(f"{key}: {path.parent} is in use by {who}; {cure}") from None
    return lock


def temporary_of(file: Path) -> Path:
    """Return a partly random name next to `file`, to be opened with "x", which follows no link."""
    return file.with_name(f".{file.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp")


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `file` once the block ends without an error and all is on disk."""
    temporary = temporary_of(file)
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
        sync_folder(file.parent)  # a power failure must not undo this renaming and keep a later one
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any, key: str) -> None:
    """Write `content` as JSON to `path`, completely or not at all, in a folder that is made if it is missing.

    An `InputError` on failure names option `key`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as stream:
            stream.write((json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be written ({error.strerror}); name another file") from None


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporaries(folder: Path) -> None:
    """Remove temporary files of killed processes from `folder`; the caller must hold the folder's lock."""
    for file in folder.glob(_TEMPORARIES):
        with contextlib.suppress(OSError):
            file.unlink()
