"""Criteo's click logs, from text, TorchRec's arrays or MLPerf's multi-hot arrays.

Each of the three is a list of days, and a day a set of arrays, in memory or mapped from disk, which `days` reads.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, DataConfig, InputError, TablesConfig
from dlrm_overlap.data.criteo_text import BLOCK_BYTES, criteo_files, hash_ids, read_rows
from dlrm_overlap.data.days import Day, Days, cap_rows
from dlrm_overlap.data.npy_files import map_npy, map_npz
from dlrm_overlap.data.prepared import day_file, read_meta

log = logging.getLogger("dlrm_overlap")


class CriteoText(Days):
    """Criteo's text, Kaggle's or the Terabyte set's, parsed when built and held in memory: 160 bytes a sample.

    `criteo_text` has files, format and dense features; `hash_ids` turns a category into a row.
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error", block_bytes: int = BLOCK_BYTES):
        """Parse `path`, a file or a folder. With `bad_rows` skip, bad lines are left out, and counted in `skipped`.

        Raises:
            InputError: if there are no rows in `tables`, no files, a file without samples, or a bad line.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but text names no rows; set data.tables.rows, say to 100000")
        rows = cap_rows(_per_table(tables.rows), tables.max_rows)
        days = []
        for file in criteo_files(Path(path)):
            for text in read_rows(file, block_bytes, skip=bad_rows == "skip"):
                self.skipped += text.skipped
                if len(text.labels) == 0:
                    continue
                ids = hash_ids(text.categories, text.missing, rows)
                days.append(Day(str(file), text.labels, text.dense, ids.T[:, :, None]))
        super().__init__(days, rows, None)
        if self.skipped:
            lines = self.skipped + self.num_samples
            log.warning("data.bad_rows: %s: %d of %d lines are no samples, and left out", path, self.skipped, lines)


class CriteoNpy(Days):
    """TorchRec's arrays, mapped from disk: day_i_{dense,sparse,labels}.npy for some days i, in ascending order.

    dense: float32 [n, 13]. sparse: int32 [n, 26]. labels: int32 [n] or [n, 1].
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error"):
        """Map the days of the folder `path`. Rows that `tables` lacks are those of `dlrm-overlap prepare`'s meta.json.

        Raises:
            InputError: if the rows are unknown, if a file is missing, breaks the format, or differs in length from the
                others of its day, or if `prepare` was interrupted.
        """
        folder = Path(path)
        meta = read_meta(folder)
        unfinished = [day.name for day in meta.days if day.samples is None] if meta else []
        if unfinished:
            raise InputError(
                f"{folder}: `dlrm-overlap prepare` did not finish {unfinished[0]}; run it again with the same arguments"
            )
        days = []
        for day in _days(folder, "sparse.npy"):
            sparse = map_npy(day_file(folder, day, "sparse"), np.int32, CRITEO_TABLES)
            days.append(_open_day(folder, day, sparse.T[:, :, None]))
        if (rows := tables.rows or (meta and meta.rows)) is None:
            raise InputError(
                f"data.tables.rows: null, and {folder} has no meta.json of `dlrm-overlap prepare`; set data.tables.rows"
            )
        super().__init__(days, _per_table(rows), tables.max_rows, bad_rows)


class CriteoMultihot(Days):
    """MLPerf's multi-hot arrays, mapped from disk: day_i_sparse_multi_hot.npz and day_i_{dense,labels}.npy.

    The npz holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag]. dense and labels are as in `CriteoNpy`.
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
        days = [
            _open_day(folder, day, map_npz(folder / f"day_{day}_sparse_multi_hot.npz"))
            for day in _days(folder, "sparse_multi_hot.npz")
        ]
        first = [ids.shape[1] for ids in days[0].ids]
        for day in days:
            if (found := [ids.shape[1] for ids in day.ids]) != first:
                raise InputError(f"{day.name}: bags of {found} ids, but the first day's have {first}; take one day out")
        super().__init__(days, _per_table(tables.rows), tables.max_rows, bad_rows)


def open_criteo(config: DataConfig, path: str) -> CriteoText | CriteoNpy | CriteoMultihot:
    """Open the samples at `path` (config.path or config.eval_path) in the format that config.kind names.

    Raises:
        InputError: if they do not exist, are empty or break their format.
    """
    kinds = {"criteo_tsv": CriteoText, "criteo_npy": CriteoNpy, "criteo_multihot": CriteoMultihot}
    return kinds[config.kind](path, config.tables, config.bad_rows)


def _per_table(rows: int | Sequence[int]) -> list[int]:
    return [rows] * CRITEO_TABLES if isinstance(rows, int) else list(rows)


def _days(folder: Path, sparse: str) -> list[int]:
    """Return, in ascending order, the days of which `folder` holds dense.npy, labels.npy or `sparse`."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: not a folder; set data.path, or data.eval_path, to the one that holds day_0_{sparse} and "
            f"its like"
        )
    name = re.compile(rf"day_(\d+)_(dense\.npy|labels\.npy|{re.escape(sparse)})")
    days = {int(match[1]) for file in folder.iterdir() if (match := name.fullmatch(file.name))}
    if not days:
        raise InputError(f"{folder}: holds no day_0_{sparse} nor its like; give another folder or data.kind")
    return sorted(days)


def _open_day(folder: Path, day: int, ids: Sequence[np.ndarray] | np.ndarray) -> Day:
    name = str(folder / f"day_{day}")
    dense = map_npy(day_file(folder, day, "dense"), np.float32, CRITEO_DENSE)
    labels = map_npy(day_file(folder, day, "labels"), np.int32, 1)[:, 0]
    if len(lengths := {len(dense), len(labels), *map(len, ids)}) > 1:
        raise InputError(
            f"{name}: files of {sorted(lengths)} samples, but dense, labels and sparse must agree; replace them"
        )
    return Day(name, labels, dense, ids)
