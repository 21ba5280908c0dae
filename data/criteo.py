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
            InputError: if `tables` has no rows, if a file is missing, breaks the format, is compressed or differs in
                length from the others of its day, or if a day's bags hold other numbers of ids than the first day's.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but Criteo's arrays name no rows; set data.tables.rows")
        rows = [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows
        folder, ids = Path(path), "sparse_multi_hot.npz" if multi_hot else "sparse.npy"
        days = [_open_day(folder, day, ids) for day in _days_in(folder, ids)]
        first, *others = ([np.asarray(ids).shape[1] for ids in day.ids] for day in days)
        for day, found in zip(days[1:], others, strict=True):
            if found != first:
                raise InputError(f"{day.name}: bags of {found} ids, but the first day's have {first}; take one day out")
        super().__init__(days, rows, tables.max_rows)


def _days_in(folder: Path, ids: str) -> list[int]:
    """Return, in ascending order, the days of which `folder` holds a file.

    Raises:
        InputError: if there is none.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: not a folder; set data.path, or data.eval_path, to the one that holds day_0_{ids} and its like"
        )
    name = re.compile(rf"day_(\d+)_(dense\.npy|labels\.npy|{re.escape(ids)})")
    days = {int(match[1]) for file in folder.iterdir() if (match := name.fullmatch(file.name))}
    if not days:
        raise InputError(f"{folder}: holds no day_0_{ids} nor its like; give another folder or data.kind")
    return sorted(days)


def _open_day(folder: Path, day: int, ids: str) -> Day:
    name = f"{folder}/day_{day}"
    file = Path(f"{name}_{ids}")
    tables = map_npz(file) if file.suffix == ".npz" else list(map_npy(file, np.int32, CRITEO_TABLES).T[:, :, None])
    dense = map_npy(Path(f"{name}_dense.npy"), np.float32, CRITEO_DENSE)
    labels = map_npy(Path(f"{name}_labels.npy"), np.int32, 1)
    if len(lengths := {len(dense), len(labels), *map(len, tables)}) > 1:
        raise InputError(
            f"{name}: files of {sorted(lengths)} samples, but dense, labels and sparse must agree; replace them"
        )
    return Day(name, labels, dense, tables)
