"""Checksums of the pieces of a checkpoint's files, computed while they are written and checked while they are read.

The pieces of a file follow each other without gaps, so every byte is in one of them. The elements of a large tensor are
a piece, so `torch.load` reads them at once, straight into the tensor's memory. Loads no torch.
"""

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

_LARGE = 1 << 20  # bytes of one write that become a piece
_END = 1 << 13
_CHUNK = 1 << 22  # bytes that are read, and then hashed while they are in the cache


class DamagedError(InputError):
    """The files of a checkpoint are not the ones that were written."""


class Piece(NamedTuple):
    """A range of bytes of a file."""

    size: int
    checksum: str
    """xxh3_128 in hexadecimal; empty in a checkpoint whose format has no checksums"""


class ChecksummedFile:
    """A new file, whose pieces get their checksums while it is written; a context manager."""

    def __init__(self, path: Path) -> None:
        self.pieces: list[Piece] = []
        self._file, self._thread = path.open("wb"), ThreadPoolExecutor(1, "checksum")
        self._hash, self._begin = xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`. If it is large, it is a piece, and a second thread computes its checksum at the same time.

        Its last bytes are in the next piece: `torch.load` reads the end of its archive first, 4 KiB of it.
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
            hashed.result()  # `data` may be gone after this call
        self.end_piece()
        return len(body) + self.write(end)

    def end_piece(self) -> None:
        """End the piece that is being written, if it has any bytes."""
        if size := self.tell() - self._begin:
            self.pieces.append(Piece(size, self._hash.hexdigest()))
            self._hash, self._begin = xxh3_128(), self._begin + size

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._file.tell()

    def flush(self) -> None:
        """Pass what is buffered to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Close the file, synced unless the block ends by an error."""
        with self._file:
            self._thread.shutdown()
            self.end_piece()
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())


class CheckedFile(io.RawIOBase):
    """Consecutive pieces of a file, to be read as if they were a file; a context manager.

    Each piece is checked before any of its bytes is returned, and those that were not read are checked at the end.

    Raises:
        DamagedError: if the file cannot be read, or a checksum differs.
    """

    def __init__(self, path: Path, begin: int, pieces: list[Piece]) -> None:
        super().__init__()
        self.fault: DamagedError | None = None
        """what was raised last, since a caller in C++ may turn it into another error"""
        self._path, self._first, self._pieces = path, begin, pieces
        *self._begins, self._size = accumulate((piece.size for piece in pieces), initial=0)
        self._position, self._unread = 0, set(range(len(pieces)))
        self._held, self._bytes = -1, memoryview(b"")  # a piece of which a part was asked for
        try:
            self._file = open_file(path)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position from the first byte of the first piece."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position, and return it."""
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as there are bytes, and return their number."""
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
        """Read the whole piece `index`, and check it."""
        begin, piece, hashed = self._first + self._begins[index], self._pieces[index], xxh3_128()
        for at in range(0, piece.size, _CHUNK):
            chunk = into[at : at + _CHUNK]
            self._read_chunk(begin + at, chunk)
            if piece.checksum:
                hashed.update(chunk)
        if piece.checksum not in ("", hashed.hexdigest()):
            self._fail(f"is damaged: the checksum of bytes {begin} to {begin + piece.size} differs")
        self._unread.discard(index)

    def _read_chunk(self, begin: int, chunk: memoryview) -> None:
        try:
            while chunk and (count := os.preadv(self._file.fileno(), [chunk], begin)):
                chunk, begin = chunk[count:], begin + count
        except OSError as error:
            self._fail(f"cannot be read ({error.strerror})")
        if chunk:
            self._fail(f"is damaged: it ends at byte {begin}")

    def _fail(self, fault: str) -> NoReturn:
        self.fault = DamagedError(f"{self._path} {fault}")
        raise self.fault

    def __exit__(self, error: object, *_: object) -> None:
        """Check the pieces that were not read, unless the block ends by an error, and close the file."""
        with self._file:
            for index in sorted(self._unread) if error is None else ():
                self._read(index, memoryview(bytearray(self._pieces[index].size)))
