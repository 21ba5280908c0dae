"""MLPerf's multi-hot arrays of Criteo's samples. Its text is a table (`schema`), TorchRec's arrays are `prepared`."""

from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days
from dlrm_overlap.data.npy_files import map_npy, map_npz
from dlrm_overlap.data.prepared import day_file, days_in


class CriteoMultihot(Days):
    """MLPerf's multi-hot arrays, mapped from disk: day_i_sparse_multi_hot.npz and day_i_{dense,labels}.npy.

    The npz holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag]. dense is float32 [n, 13], labels is int32
    [n] or [n, 1].
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error"):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, if a file is missing, breaks the format, is compressed or differs in
                length from the others of its day, or if a day's bags hold other numbers of ids than the first day's.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but multi-hot arrays name no rows; set data.tables.rows")
        folder = Path(path)
        days = [_open_day(folder, day) for day in days_in(folder, "dense", "labels", "sparse_multi_hot", suffix="npz")]
        first, *others = ([np.asarray(ids).shape[1] for ids in day.ids] for day in days)
        for day, found in zip(days[1:], others, strict=True):
            if found != first:
                raise InputError(f"{day.name}: bags of {found} ids, but the first day's have {first}; take one day out")
        rows = [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows
        super().__init__(days, rows, tables.max_rows, bad_rows)


def _open_day(folder: Path, day: int) -> Day:
    name, ids = str(folder / f"day_{day}"), map_npz(folder / f"day_{day}_sparse_multi_hot.npz")
    dense = map_npy(day_file(folder, day, "dense"), np.float32, CRITEO_DENSE)
    labels = map_npy(day_file(folder, day, "labels"), np.int32, 1)
    if len(lengths := {len(dense), len(labels), *map(len, ids)}) > 1:
        raise InputError(
            f"{name}: files of {sorted(lengths)} samples, but dense, labels and sparse must agree; replace them"
        )
    return Day(name, labels, dense, ids)
