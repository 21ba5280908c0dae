"""Criteo's samples as TorchRec's arrays, or as MLPerf's multi-hot arrays, mapped from disk."""

import io
import math
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, TablesConfig, in_one_line
from dlrm_overlap.data.day import Day, require_successive
from dlrm_overlap.data.days import Days
from dlrm_overlap.launching.files import open_file

_ZIP_HEADER_BYTES = 30  # before a member's name, extra field and data
_NPY_HEADER_BYTES = 1 << 16  # limit; numpy writes 128 for an array of numbers


class Criteo(Days):
    """Days mapped from disk: day_i_dense.npy, float32 [n, 13]; day_i_labels.npy, int32 [n] or [n, 1]; and the ids.

    TorchRec's ids are in day_i_sparse.npy, int32 [n, 26]; MLPerf's multi-hot ids in day_i_sparse_multi_hot.npz, which
    has 0.npy .. 25.npy, one for each table, int32 [n, ids per bag].
    """

    id_cure = "correct the file, or set data.tables.rows to the rows that the ids of all days were made for"

    def __init__(self, path: str | Path, tables: TablesConfig, multi_hot: bool):
        """Map the days of the folder `path`. Raises an InputError if `tables` gives no rows or a file is malformed."""
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but Criteo's arrays name no rows; set data.tables.rows")
        rows = [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows
        names = [re.match(r"day_(\d+)_", file.name) for file in Path(path).glob("day_*.np[yz]")]
        days = sorted({int(name[1]) for name in names if name})
        if not days:
            raise InputError(f"{path}: holds no file such as day_0_dense.npy; correct data.path or data.eval_path")
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
    """Map a .npy file, whose array must be [n, columns], or [n] for one column."""
    with _named(file):
        return _map(file, 0, dtype, columns)


def _map_member(file: Path, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed, so it cannot be mapped; write it by numpy.savez")
    with file.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(_ZIP_HEADER_BYTES)
        name_bytes, extra_bytes = np.frombuffer(header, "<u2", 2, _ZIP_HEADER_BYTES - 4).tolist()
    return _map(file, info.header_offset + _ZIP_HEADER_BYTES + name_bytes + extra_bytes, np.int32, None)


def _map(file: Path, offset: int, dtype: type, columns: int | None) -> np.ndarray:
    """Map the array whose npy header is at `offset`, as [n, columns], or with any columns if None.

    Everything is checked before memory of the array's size is allocated.
    """
    with file.open("rb") as stream:
        stream.seek(offset)
        header = io.BytesIO(stream.read(_NPY_HEADER_BYTES))
    version = np.lib.format.read_magic(header)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy format {version}, but it must be 1.0 or 2.0")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, found = read_header(header)
    is_column = columns == 1 and len(shape) == 1
    is_shape = (len(shape) == 2 and shape[1] == (columns or max(1, shape[1]))) or is_column
    if found != dtype or not is_shape or any(type(each) is not int or each < 0 for each in shape):
        wanted = f"{np.dtype(dtype)} [samples, {columns or 'ids a bag'}]"
        raise ValueError(f"{found} {list(shape)}, but it must be {wanted}")
    first, size = offset + header.tell(), math.prod(shape) * found.itemsize
    if (rest := file.stat().st_size - first) < size:
        raise ValueError(f"{rest} bytes after its header, which names {size}")
    # The map may be unaligned, but `read` only copies from it, which alignment does not speed up.
    order = "F" if fortran_order else "C"
    array = np.memmap(file, found, "r", first, shape, order=order) if size else np.empty(shape, found)
    return np.asarray(array[:, None] if is_column else array)  # a plain array slices faster than np.memmap


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Turn any error of numpy and zipfile into an InputError. numpy parses headers as literals and executes nothing."""
    try:
        open_file(file).close()  # refuses a pipe, at which numpy would wait
        yield
    except Exception as error:
        text = in_one_line(error) or type(error).__name__
        raise InputError(f"{file}: not the array that is needed ({text:.300}); add or replace it") from None
