"""Arrays in numpy's files, mapped from disk: npy, and the members of an npz that is not compressed."""

import tokenize
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, InputError, in_one_line

# What numpy raises for a file that is none of its arrays. It reads the header as a literal, so nothing is executed.
_NOT_NPY = (OSError, ValueError, KeyError, EOFError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile)
_ZIP_HEADER_BYTES = 30  # in front of a member's name, extra field and data


def map_npy(file: Path, dtype: np.dtype | type, columns: int) -> np.ndarray:
    """Map the [n, columns] array (or [n], for one column) of an npy file."""
    with _named(file):
        array = np.load(file, mmap_mode="c", allow_pickle=False)  # torch warns of memory that is read-only
        array = array[:, None] if columns == 1 and array.ndim == 1 else array
        return _checked(array, dtype, columns)


def map_npz(file: Path) -> list[np.ndarray]:
    """Map the members 0.npy .. 25.npy of an npz file, int32 [n, ids a bag], each where it lies in the file."""
    with _named(file), zipfile.ZipFile(file) as archive:
        return [_map_member(file, archive.getinfo(f"{t}.npy")) for t in range(CRITEO_TABLES)]


def _map_member(file: Path, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed, so it cannot be mapped; write it by numpy.savez")
    with file.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(_ZIP_HEADER_BYTES)
        name_bytes, extra_bytes = np.frombuffer(header, "<u2", 2, _ZIP_HEADER_BYTES - 4).tolist()
        stream.seek(name_bytes + extra_bytes, 1)
        np.lib.format.read_magic(stream)
        shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
        # The map may be unaligned, but `read` only copies from it, which is as fast as from an aligned one.
        array = np.memmap(file, dtype, "r", stream.tell(), shape, order="F" if fortran_order else "C")
    return _checked(array, np.int32, None)


def _checked(array: np.ndarray, dtype: np.dtype | type, columns: int | None) -> np.ndarray:
    """Return `array` as a plain [n, columns] array after checking its type and shape; None allows any columns but 0."""
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] != (columns or max(1, array.shape[1])):
        wanted = f"{np.dtype(dtype)} [samples, {columns or 'ids a bag'}]"
        raise ValueError(f"{array.dtype} {list(array.shape)}, but it must be {wanted}")
    return np.asarray(array)  # a plain array slices faster than np.memmap


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except _NOT_NPY as error:
        raise InputError(f"{file}: not the array that is needed ({in_one_line(error)}); add or replace it") from None
