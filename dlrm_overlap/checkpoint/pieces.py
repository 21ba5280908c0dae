"""Checksums of the pieces that cover a file, computed on writing and checked on reading. Does not import torch.

A large tensor is one piece, so that `torch.load` reads it straight into its memory.
"""

import errno
import io
import os
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

from xxhash import xxh3_128

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import open_file

_LARGE = 1 << 20  # bytes; a larger write becomes a piece
_END = 1 << 13
_SYNCED = 1 << 30  # bytes; one sync of more could take longer than `embedding.wait_timeout_s`
_CHUNK = 1 << 22  # bytes; small enough to be hashed while still in the CPU's cache


class DamagedError(InputError):
    """The files of a checkpoint were changed after they were written."""

    cure = "copy it again, or give another"


class UnreadableError(InputError):
    """The files of a checkpoint could not be read for a reason that is not in them, so they may be intact."""

    cure = "the checkpoint may be intact: remove the cause, and try again"


_CURES = {
    errno.EMFILE: "raise the limit of `ulimit -n`",
    errno.ENFILE: "close other programs on this machine",
    errno.ENOMEM: "free memory on this machine",
    errno.EACCES: "correct its permissions",
    errno.EPERM: "correct its permissions",
}


def cannot_read(path: Path, error: OSError) -> InputError:
    """Return an UnreadableError if `error` is about this user or machine, else a DamagedError."""
    text = f"{path} cannot be read ({error.strerror})"
    if cure := _CURES.get(error.errno or 0):
        return UnreadableError(f"{text}; {cure}, and try again")
    return DamagedError(text)


class Piece(NamedTuple):
    size: int
    checksum: str
    """xxh3_128 in hexadecimal; empty in a format without checksums"""


class ChecksummedFile:
    """A new file with checksums of its pieces; a context manager, which syncs it to disk unless the block fails.

    A large file is also synced while it is written.
    """

    def __init__(self, path: Path) -> None:
        self.pieces: list[Piece] = []
        self._file, self._thread = path.open("wb"), ThreadPoolExecutor(1, "checksum")
        self._hash, self._begin, self._synced = xxh3_128(), 0, 0

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`. Large data becomes one piece, which a second thread hashes while this one writes it.

        The last bytes of `data` go to the next piece, since `torch.load` first reads the last 4 KiB of an archive.
        """
        if len(data) < _LARGE:
            self._hash.update(data)
            return self._file.write(data)
        self.end_piece()
        body, end = data[:-_END], data[-_END:]
        hashed = self._thread.submit(self._hash.update, body)
        try:
            self._file.write(body)
        finally:
            hashed.result()  # `data` may be freed after this call
        self.end_piece()
        return len(body) + self.write(end)

    def end_piece(self) -> None:
        if size := self.tell() - self._begin:
            self.pieces.append(Piece(size, self._hash.hexdigest()))
            self._hash, self._begin = xxh3_128(), self._begin + size
            if self._begin - self._synced >= _SYNCED:
                self._sync()

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with self._file:
            self._thread.shutdown()
            self.end_piece()
            if error is None:
                self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced = self._begin


class CheckedFile(io.RawIOBase):
    """Consecutive pieces of a file, readable as a file from position 0; a context manager.

    A piece is checked before its bytes are returned, or on exit if it was not read. If a checksum differs, a
    DamagedError is raised, and an UnreadableError if the file cannot be read now.
    """

    def __init__(self, path: Path, begin: int, pieces: list[Piece]) -> None:
        super().__init__()
        self.fault: InputError | None = None
        """the last error raised, which a caller in C++ may replace by its own"""
        self._path, self._first, self._pieces = path, begin, pieces
        *self._begins, self._size = accumulate((piece.size for piece in pieces), initial=0)
        self._position, self._unread = 0, set(range(len(pieces)))
        self._held, self._bytes = -1, memoryview(b"")  # a piece that was read in part
        try:
            self._file = open_file(path)
        except OSError as error:
            raise cannot_read(path, error) from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        while done < len(view) and self._position < self._size:
            index = bisect_right(self._begins, self._position) - 1
            skipped, size = self._position - self._begins[index], self._pieces[index].size
            count = min(size - skipped, len(view) - done)
            part = view[done : done + count]
            if count == size:
                self._read(index, part)
            else:
                if index != self._held:
                    self._bytes = memoryview(bytearray(size))
                    self._read(index, self._bytes)
                    self._held = index
                part[:] = self._bytes[skipped : skipped + count]
            self._position, done = self._position + count, done + count
        return done

    def _read(self, index: int, into: memoryview) -> None:
        begin, piece, hashed = self._first + self._begins[index], self._pieces[index], xxh3_128()
        for at in range(0, piece.size, _CHUNK):
            chunk = into[at : at + _CHUNK]
            self._read_chunk(begin + at, chunk)
            if piece.checksum:
                hashed.update(chunk)
        if piece.checksum not in ("", hashed.hexdigest()):
            at = f"bytes {begin} to {begin + piece.size}"
            self._fail(DamagedError(f"{self._path} is damaged: the checksum of {at} differs"))
        self._unread.discard(index)

    def _read_chunk(self, begin: int, chunk: memoryview) -> None:
        try:
            while chunk and (count := os.preadv(self._file.fileno(), [chunk], begin)):
                chunk, begin = chunk[count:], begin + count
        except OSError as error:
            self._fail(cannot_read(self._path, error))
        if chunk:
            self._fail(DamagedError(f"{self._path} is damaged: it ends at byte {begin}"))

    def _fail(self, fault: InputError) -> NoReturn:
        self.fault = fault
        raise fault

    def __exit__(self, error: object, *_: object) -> None:
        with self._file:
            for index in sorted(self._unread) if error is None else ():
                self._read(index, memoryview(bytearray(self._pieces[index].size)))
