"""Checksums of a file's blocks, computed on writing and compared when a block is first read."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from dlrm_overlap.config import InputError

BLOCK_BYTES = 1 << 18


class ChecksumWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._block, self._filled = file, xxhash.xxh3_64(), 0
        self._checksums: list[int] = []

    def write(self, array: np.ndarray) -> None:
        rest = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._file.write(rest.data)
        while len(rest):
            part, rest = np.split(rest, [BLOCK_BYTES - self._filled])
            self._block.update(part.data)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> np.ndarray:
        if self._filled:
            self._end_block()
        return np.array(self._checksums, "<u8")

    def _end_block(self) -> None:
        self._checksums.append(self._block.intdigest())
        self._block.reset()
        self._filled = 0


class CheckedArray:
    """An array mapped from a file; each block is checked when the process first reads it."""

    def __init__(self, file: Path, array: np.ndarray, checksums: np.ndarray) -> None:
        """`array` [n, ..] is the whole `file`."""
        self._file, self._array, self._checksums = file, array, checksums
        self._bytes = array.reshape(-1).view(np.uint8)
        self._row_bytes = array[:1].nbytes
        self._compared = bytearray(len(checksums))  # 1 for each block that is unchanged
        self._last: tuple[slice | np.ndarray | None, np.ndarray] = None, array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the rows of a slice without a step, or of indices; raise an InputError if a block has changed.

        Do not modify `rows` later: the result is cached for this object.
        """
        # All fields of a batch are unpacked from the same `rows` object.
        if self._last[0] is not rows:
            self._check(rows)
            self._last = rows, self._array[rows]
        return self._last[1]

    def _check(self, rows: slice | np.ndarray) -> None:
        if isinstance(rows, slice):
            first, last, _ = rows.indices(len(self))
            block, end = first * self._row_bytes // BLOCK_BYTES, -(-last * self._row_bytes // BLOCK_BYTES)
            while first < last and (block := self._compared.find(0, block, end)) >= 0:
                self._compare(block)
        elif rows.size:
            # Offsets within a row, at least one in each block of the row.
            within = np.r_[0 : self._row_bytes : BLOCK_BYTES, self._row_bytes - 1]
            blocks = (rows[:, None] * self._row_bytes + within) // BLOCK_BYTES
            for block in np.unique(blocks[np.frombuffer(self._compared, np.uint8)[blocks] == 0]).tolist():
                self._compare(block)

    def _compare(self, block: int) -> None:
        first = block * BLOCK_BYTES
        content = self._bytes[first : first + BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(content.data) != self._checksums[block]:
            raise InputError(
                f"{self._file}: the bytes {first} to {first + len(content) - 1} have changed since "
                f"`dlrm-overlap prepare` wrote them, their checksum differs; copy the file again, or prepare again"
            )
        self._compared[block] = 1


def digest_of(*parts: Any) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
