"""TorchRec's arrays of Criteo's samples, and MLPerf's multi-hot ones, mapped from disk."""

import re
import tokenize
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, TablesConfig, in_one_line
from dlrm_overlap.data.days import Day, Days, require_successive

# What numpy raises for a file that is none of its arrays. It reads the header as a literal, so nothing is executed.
_NOT_NPY = (OSError, ValueError, KeyError, EOFError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile)
_ZIP_HEADER_BYTES = 30  # in front of a member's name, extra field and data


class Criteo(Days):
    """Days mapped from disk: day_i_dense.npy, float32 [n, 13]; day_i_labels.npy, int32 [n] or [n, 1]; and the ids.

    TorchRec's ids are day_i_sparse.npy, int32 [n, 26]. MLPerf's multi-hot ones are day_i_sparse_multi_hot.npz, which
    holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag].
    """

    id_cure = "correct the file, or set data.tables.rows to the rows that the ids of all days were made for"

    def __init__(self, path: str | Path, tables: TablesConfig, multi_hot: bool):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, if a day is missing between others, or if a file is missing, breaks the
                format, is compressed or differs in length from the others of its day.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but Criteo's arrays name no rows; set data.tables.rows")
        rows = [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows
        names = [re.match(r"day_(\d+)_", file.name) for file in Path(path).glob("day_*.np[yz]")]
        days = sorted({int(name[1]) for name in names if name})
        if not days:
            raise InputError(f"{path}: holds no day_0_dense.npy nor its like; set data.path, or data.eval_path, anew")
        require_successive(Path(path), days)
        super().__init__([_open_day(f"{path}/day_{day}", multi_hot) for day in days], rows, tables.max_rows)


def _open_day(name: str, multi_hot: bool) -> Day:
    if multi_hot:
        file = Path(f"{name}_sparse_multi_hot.npz")
        with _named(file), zipfile.ZipFile(file) as archive:
            tables = [_map_member(file, archive.getinfo(f"{t}.npy")) for t in range(CRITEO_TABLES)]
    else:
        tables = list(_map_npy(Path(f"{name}_sparse.npy"), np.int32, CRITEO_TABLES).T[:, :, None])
    dense = _map_npy(Path(f"{name}_dense.npy"), np.float32, CRITEO_DENSE)
    labels = _map_npy(Path(f"{name}_labels.npy"), np.int32, 1)
    if len(lengths := {len(dense), len(labels), *map(len, tables)}) > 1:
        raise InputError(f"{name}: arrays of {sorted(lengths)} samples, which must agree; replace them")
    return Day(name, labels, dense, tables)


def _map_npy(file: Path, dtype: type, columns: int) -> np.ndarray:
    """Map the [n, columns] array (or [n], for one column) of an npy file."""
    with _named(file):
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return _checked(array[:, None] if columns == 1 and array.ndim == 1 else array, dtype, columns)


def _map_member(file: Path, info: zipfile.ZipInfo) -> np.ndarray:
    """Map a member of an npz file, int32 [n, ids a bag], where it lies in the file."""
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


def _checked(array: np.ndarray, dtype: type, columns: int | None) -> np.ndarray:
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
