"""TorchRec's arrays of Criteo's samples, and MLPerf's multi-hot ones."""

import re
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days
from dlrm_overlap.data.npy_files import map_npy, map_npz


class Criteo(Days):
    """Days mapped from disk: day_i_dense.npy, float32 [n, 13]; day_i_labels.npy, int32 [n] or [n, 1]; and the ids.

    TorchRec's ids are day_i_sparse.npy, int32 [n, 26]. MLPerf's multi-hot ones are day_i_sparse_multi_hot.npz, which
    holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag].
    """

    def __init__(self, path: str | Path, tables: TablesConfig, multi_hot: bool):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, or if a file is missing, breaks the format, is compressed or differs in
                length from the others of its day.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but Criteo's arrays name no rows; set data.tables.rows")
        rows = [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows
        names = [re.match(r"day_(\d+)_", file.name) for file in Path(path).glob("day_*.np[yz]")]
        days = sorted({int(name[1]) for name in names if name})
        if not days:
            raise InputError(f"{path}: holds no day_0_dense.npy nor its like; set data.path, or data.eval_path, anew")
        super().__init__([_open_day(f"{path}/day_{day}", multi_hot) for day in days], rows, tables.max_rows)


def _open_day(name: str, multi_hot: bool) -> Day:
    if multi_hot:
        tables = map_npz(Path(f"{name}_sparse_multi_hot.npz"))
    else:
        tables = list(map_npy(Path(f"{name}_sparse.npy"), np.int32, CRITEO_TABLES).T[:, :, None])
    dense = map_npy(Path(f"{name}_dense.npy"), np.float32, CRITEO_DENSE)
    labels = map_npy(Path(f"{name}_labels.npy"), np.int32, 1)
    if len(lengths := {len(dense), len(labels), *map(len, tables)}) > 1:
        raise InputError(f"{name}: arrays of {sorted(lengths)} samples, which must agree; replace them")
    return Day(name, labels, dense, tables)
