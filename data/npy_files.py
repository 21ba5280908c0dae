"""Criteo's arrays in numpy's files, mapped from disk: npy, and the members of an npz that is not compressed."""

import tokenize
import zipfile
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_TABLES, InputError

NOT_NPY = (ValueError, EOFError, SyntaxError, tokenize.TokenError)
"""What numpy raises for a file that is none of its arrays. It reads the header as a literal, so nothing is executed."""

_ZIP_HEADER_BYTES = 30  # in front of a member's name, extra field and data


def map_npy(file: Path, dtype: np.dtype | type, columns: int) -> np.ndarray:
    """Map the [n, columns] array (or [n], for one column) of an npy file."""
    try:
        array = np.load(file, mmap_mode="c", allow_pickle=False)  # torch warns of memory that is read-only
    except (OSError, *NOT_NPY) as error:
        raise _unreadable(file, error) from error
    return _checked(array, file, dtype, columns)


def map_npz(file: Path) -> list[np.ndarray]:
    """Map the members 0.npy .. 25.npy of an npz file, each where it lies in the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = {info.filename: info for info in archive.infolist()}
        tables = []
        for t in range(CRITEO_TABLES):
            if (info := members.get(f"{t}.npy")) is None:
                raise InputError(f"{file}: has no member {t}.npy; it must hold 0.npy .. {CRITEO_TABLES - 1}.npy")
            if info.compress_type != zipfile.ZIP_STORED:
                raise InputError(f"{file}: compressed, so it cannot be mapped; write it anew with numpy.savez")
            tables.append(_checked(_map_member(file, info), file, np.int32, None, f", member {t}.npy"))
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable(file, error) from error
    return tables


def _map_member(file: Path, info: zipfile.ZipInfo) -> np.ndarray:
    with file.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(_ZIP_HEADER_BYTES)
        name_bytes, extra_bytes = np.frombuffer(header, "<u2", 2, _ZIP_HEADER_BYTES - 4).tolist()
        stream.seek(name_bytes + extra_bytes, 1)
        try:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran_order, dtype = read(stream)
            # The map may be unaligned, but `read` only copies from it, which is as fast as from an aligned one.
            return np.memmap(file, dtype, "r", stream.tell(), shape, order="F" if fortran_order else "C")
        except (KeyError, *NOT_NPY) as error:
            raise InputError(f"{file}: member {info.filename} is not an npy array ({error}); replace it") from error


def _checked(
    array: np.ndarray, file: Path, dtype: np.dtype | type, columns: int | None, member: str = ""
) -> np.ndarray:
    """Return `array` as a plain [n, columns] array after checking its type and shape; None allows any columns but 0."""
    if columns == 1 and array.ndim == 1:
        array = array[:, None]
    wanted = columns or "ids a bag"
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] != (columns or max(1, array.shape[1])):
        raise InputError(
            f"{file}{member}: {array.dtype} {list(array.shape)}, but it must be {np.dtype(dtype)} [samples, {wanted}]; "
            f"convert it"
        )
    return np.asarray(array)  # a plain array slices faster than np.memmap


def _unreadable(file: Path, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{file}: missing, but a day has dense, labels and sparse; add it or take the day out")
    return InputError(f"{file}: not a whole numpy file ({error}); replace it")
