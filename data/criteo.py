"""TorchRec's arrays of Criteo's samples, and MLPerf's multi-hot ones."""

import re
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days
from dlrm_overlap.data.npy_files import map_npy, map_npz


class CriteoArrays(Days):
    """TorchRec's arrays, mapped from disk: day_i_{dense,sparse,labels}.npy, of float32 [n, 13], int32 [n, 26], [n]."""

    def __init__(self, path: str | Path, tables: TablesConfig):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, or if a file is missing, breaks the format or differs in length from
                the others of its day.
        """
        folder, rows = Path(path), _rows(tables)
        days = [_open_day(folder, day, "sparse.npy") for day in _days_in(folder, "sparse.npy")]
        super().__init__(days, rows, tables.max_rows)


class CriteoMultihot(Days):
    """MLPerf's multi-hot arrays, mapped from disk: day_i_sparse_multi_hot.npz and day_i_{dense,labels}.npy.

    The npz holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag]. dense is float32 [n, 13], labels is int32
    [n] or [n, 1].
    """

    def __init__(self, path: str | Path, tables: TablesConfig):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, if a file is missing, breaks the format, is compressed or differs in
                length from the others of its day, or if a day's bags hold other numbers of ids than the first day's.
        """
        folder, rows, ids = Path(path), _rows(tables), "sparse_multi_hot.npz"
        days = [_open_day(folder, day, ids) for day in _days_in(folder, ids)]
        first, *others = ([np.asarray(ids).shape[1] for ids in day.ids] for day in days)
        for day, found in zip(days[1:], others, strict=True):
            if found != first:
                raise InputError(f"{day.name}: bags of {found} ids, but the first day's have {first}; take one day out")
        super().__init__(days, rows, tables.max_rows)


def _rows(tables: TablesConfig) -> list[int]:
    if tables.rows is None:
        raise InputError("data.tables.rows: null, but Criteo's arrays name no rows; set data.tables.rows")
    return [tables.rows] * CRITEO_TABLES if isinstance(tables.rows, int) else tables.rows


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
