"""Criteo's click logs, from text, TorchRec's arrays or MLPerf's multi-hot arrays.

Each of the three is a list of days, and a day a set of arrays, in memory or mapped from disk. Samples keep the order of
the files. Positions count on from day to day; beyond the last sample comes the first one again.
"""

import logging
import re
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from dlrm_overlap.config import CRITEO_DENSE, CRITEO_TABLES, DataConfig, InputError, TablesConfig
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.criteo_text import BLOCK_BYTES, criteo_files, hash_ids, read_rows
from dlrm_overlap.data.prepare_criteo import NOT_NPY, check_sizes, day_file, read_meta

log = logging.getLogger("dlrm_overlap")

_ZIP_HEADER_BYTES = 30  # in front of a member's name, extra field and data
_STAND_IN_REACH = 1000  # samples: bad ones are few, or the file is not what it is taken for
_ROWS_CURE = "set data.tables.rows to the rows the ids were made for, or fold the ids by data.tables.max_rows"


@dataclass(frozen=True)
class _Day:
    name: str
    """path of the files without their last part, such as folder/day_0"""
    labels: np.ndarray
    """[n], any number type"""
    dense: np.ndarray
    """[n, 13] float32"""
    ids: Sequence[np.ndarray] | np.ndarray
    """of each table: [n, pooling factor] int32"""


@dataclass(frozen=True)
class _Samples:
    """Where samples are copied to: views of a batch's arrays."""

    labels: np.ndarray
    """[n] float32"""
    dense: np.ndarray
    """[n, 13] float32"""
    bags: Sequence[np.ndarray]
    """of each table: [n, pooling factor] int32"""


class _Criteo(Dataset):
    """Days, read one after the other. All bags of a table hold the same number of ids."""

    def __init__(self, days: Sequence[_Day], rows: Sequence[int], max_rows: int | None, bad_rows: str = "error"):
        """Take the rows that each table's ids were made for, and the cap to which larger tables' ids are folded.

        `bad_rows` is `data.bad_rows`: error | skip.
        """
        self._skips = bad_rows == "skip"
        self.rows: list[int] = _cap(rows, max_rows)
        self._folded = [kept < table_rows for kept, table_rows in zip(self.rows, rows, strict=True)]
        self._days = days
        self._ends = list(accumulate(len(day.labels) for day in days))
        self.num_samples: int = self._ends[-1]
        if self.num_samples == 0:
            raise InputError(f"{days[0].name}: no samples; give a data set that has some")
        self._borders = [0, self.num_samples]
        self._pooling = [ids.shape[1] for ids in days[0].ids]
        self.pooling: list[float] = [float(factor) for factor in self._pooling]
        """ids a bag, of each table"""
        self.bag_sizes: list[tuple[int, int]] = [(factor, factor) for factor in self._pooling]
        self.max_ids, self.dense_features = sum(self._pooling), CRITEO_DENSE

    def separate(self, position: int) -> None:
        """Let no sample on one side of `position` stand in for one on the other, as of samples that are held out."""
        self._borders = sorted({*self._borders, position})

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), modulo the number of samples.

        dense: [count, 13] float32. lengths and values: int32, table after table. labels: [count] float32.

        A bad sample has a label other than 0 or 1, a dense feature that is not finite, or an id that is not a row of
        its table. Ids of tables above `max_rows` are folded by modulo instead, unless they are negative. Under
        `data.bad_rows: skip` the next good sample stands in for a bad one (see `_stand_in`), so all others keep their
        positions, and every rank finds the same in the same place.

        Raises:
            InputError: naming the day, the sample and the value of a bad one, unless another stands in for it.
        """
        dense = np.empty((count, CRITEO_DENSE), np.float32)
        labels = np.empty(count, np.float32)
        values = np.empty(count * sum(self._pooling), np.int32)
        table_ends = [count * end for end in accumulate(self._pooling)]
        bags = [table.reshape(count, -1) for table in np.split(values, table_ends[:-1])]
        stand_ins = 0
        for day, source, target in self._stretches(first, count):
            into = _Samples(labels[target], dense[target], [table[target] for table in bags])
            try:
                self._copy(day, source, into)
            except InputError:
                if not self._skips:
                    raise
                stand_ins += self._replace_bad(day, source, into, (first + target.start) % self.num_samples)
        lengths = np.repeat(np.array(self._pooling, np.int32), count)
        batch = Batch.from_tensors(*map(torch.from_numpy, (dense, lengths, values, labels)))
        batch.stand_ins = stand_ins
        return batch

    def _copy(self, day: _Day, source: slice, into: "_Samples") -> None:
        """Copy samples of `day` into `into`, and check them."""
        into.labels[:] = day.labels[source]
        _check(into.labels, _is_label, f"{day.name}: label", source.start, "0 or 1; correct the file")
        into.dense[:] = day.dense[source]
        _check(into.dense, np.isfinite, f"{day.name}: dense feature", source.start, "finite; correct the file")
        for t, table in enumerate(into.bags):
            table[:] = day.ids[t][source]
            self._fold_and_check(t, table, day, source.start)

    def _replace_bad(self, day: _Day, source: slice, into: "_Samples", position: int) -> int:
        """Copy samples of `day`, the first of which is at `position`, one by one; return how many others stand in."""
        stand_ins = 0
        for i in range(len(into.labels)):
            one = _Samples(into.labels[i : i + 1], into.dense[i : i + 1], [table[i : i + 1] for table in into.bags])
            place = slice(source.start + i, source.start + i + 1)
            try:
                self._copy(day, place, one)
            except InputError as error:
                self._stand_in(position + i, one, error)
                stand_ins += 1
        return stand_ins

    def _stand_in(self, position: int, into: "_Samples", error: InputError) -> None:
        """Copy the sample that stands in for the bad one at `position`: the next good one, or else the one before.

        It is looked for on this side of the borders, not further than 1000 samples away. Raises `error`, which says
        what is wrong with the bad one, where all of these are bad: then the file is, or the tables' rows are.
        """
        border = bisect_right(self._borders, position)
        begin, end = self._borders[border - 1], self._borders[border]
        behind = range(position + 1, min(end, position + _STAND_IN_REACH))
        before = range(position - 1, max(begin, position - _STAND_IN_REACH) - 1, -1)
        for candidate in (*behind, *before):
            ((day, place, _),) = self._stretches(candidate, 1)
            try:
                self._copy(day, place, into)
                return
            except InputError:
                continue
        raise error

    def _stretches(self, first: int, count: int) -> Iterator[tuple[_Day, slice, slice]]:
        """Yield each day that holds some of the samples [first, first + count), their places there and in the batch."""
        done = 0
        while done < count:
            position = (first + done) % self.num_samples
            i = bisect_right(self._ends, position)
            day, size = self._days[i], min(count - done, self._ends[i] - position)
            start = position - (self._ends[i] - len(day.labels))
            yield day, slice(start, start + size), slice(done, done + size)
            done += size

    def _fold_and_check(self, t: int, ids: np.ndarray, day: _Day, first: int) -> None:
        # The least and the greatest id show whether all are valid, and cost a fraction of what a mask does.
        rows, what = self.rows[t], f"{day.name}: table {t}, id"
        if ids.min() < 0:
            _check(ids, lambda x: x >= 0, what, first, "at least 0; correct the file")
        if ids.max() >= rows:
            if not self._folded[t]:
                _check(ids, lambda x: x < rows, what, first, f"below {rows}, the table's rows; {_ROWS_CURE}")
            ids -= ids // rows * rows  # numpy vectorises the division by a scalar, but not `%`


def _is_label(values: np.ndarray) -> np.ndarray:
    return (values == 0) | (values == 1)


def _check(values: np.ndarray, rule: Callable[[np.ndarray], np.ndarray], what: str, first: int, words: str) -> None:
    """Raise an InputError for the first of `values` that breaks `rule`.

    Args:
        values: [n] or [n, columns], of the samples from `first` on.
        rule: maps values to as many booleans, true for those that are valid.
        what: the start of the message: the day, and what the values are.
        first: position of the first sample in its day.
        words: the end of the message: the rule in words, and the cure.
    """
    good = rule(values)
    if not good.all():
        place = np.argwhere(~good)[0]
        column = f", column {place[1]}" if place.size > 1 else ""
        raise InputError(f"{what} of sample {first + place[0]}{column} is {values[tuple(place)]}, not {words}")


class CriteoText(_Criteo):
    """Criteo's text, Kaggle's or the Terabyte set's, parsed when built and held in memory: 160 bytes a sample.

    The files, plain or .gz, are those that `criteo_files` finds. `criteo_text` describes their format and the dense
    features, and `hash_ids` how a category becomes a row; a missing one takes row 0. Forked processes share the memory;
    pickling copies it.
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error", block_bytes: int = BLOCK_BYTES):
        """Parse `path`, a file or a folder, in blocks of `block_bytes`.

        With `bad_rows` skip, lines that break the format are left out, and counted in `skipped`. They have no position,
        and every rank, which parses the same text, leaves out the same.

        Raises:
            InputError: if there are no rows in `tables`, no files, a file without samples, or a line that breaks the
                format, unless it is left out.
        """
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but text names no rows; set data.tables.rows, say to 100000")
        rows = _cap(_per_table(tables.rows), tables.max_rows)
        days = []
        for file in criteo_files(Path(path)):
            for text in read_rows(file, block_bytes, skip=bad_rows == "skip"):
                self.skipped += text.skipped
                if len(text.labels) == 0:
                    continue
                ids = hash_ids(text.categories, text.missing, rows)
                days.append(_Day(str(file), text.labels, text.dense, ids.T[:, :, None]))
        super().__init__(days, rows, None)
        if self.skipped:
            lines = self.skipped + self.num_samples
            log.warning("data.bad_rows: %s: %d of %d lines are no samples, and left out", path, self.skipped, lines)


class CriteoNpy(_Criteo):
    """TorchRec's arrays, mapped from disk: day_i_{dense,sparse,labels}.npy for some days i, in ascending order.

    dense: float32 [n, 13]. sparse: int32 [n, 26]. labels: int32 [n] or [n, 1]. Pickling carries the path alone.
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error"):
        """Map the days of the folder `path`.

        Where `tables` has no rows, they are taken from the meta.json that `dlrm-overlap prepare` wrote.

        Raises:
            InputError: if the rows are unknown, if a file is missing, breaks the format, differs in length from the
                others of its day or in size from what meta.json says of it, or if `prepare` was interrupted.
        """
        self._arguments = (path, tables, bad_rows)
        folder = Path(path)
        meta = read_meta(folder)
        unfinished = [day.name for day in meta.days if day.samples is None] if meta else []
        if unfinished:
            raise InputError(
                f"{folder}: `dlrm-overlap prepare` did not finish {unfinished[0]}; run it again with the same arguments"
            )
        days = []
        for day in _days(folder, "sparse.npy"):
            if meta and day < len(meta.days):
                check_sizes(folder, day, meta.days[day].files or {})
            sparse = _map_npy(day_file(folder, day, "sparse"), np.int32, CRITEO_TABLES)
            days.append(_open_day(folder, day, sparse.T[:, :, None]))
        if (rows := tables.rows or (meta and meta.rows)) is None:
            raise InputError(
                f"data.tables.rows: null, and {folder} has no meta.json of `dlrm-overlap prepare`; set data.tables.rows"
            )
        super().__init__(days, _per_table(rows), tables.max_rows, bad_rows)

    def __reduce__(self) -> tuple:
        return type(self), self._arguments, {"_borders": self._borders}


class CriteoMultihot(_Criteo):
    """MLPerf's multi-hot arrays, mapped from disk: day_i_sparse_multi_hot.npz and day_i_{dense,labels}.npy.

    The npz holds 0.npy .. 25.npy, one for each table, int32 [n, ids a bag]. dense and labels are as in `CriteoNpy`.
    Pickling carries the path alone.
    """

    def __init__(self, path: str | Path, tables: TablesConfig, bad_rows: str = "error"):
        """Map the days of the folder `path`.

        Raises:
            InputError: if `tables` has no rows, if a file is missing, breaks the format, is compressed or differs in
                length from the others of its day, or if a day's bags hold other numbers of ids than the first day's.
        """
        self._arguments = (path, tables, bad_rows)
        if tables.rows is None:
            raise InputError("data.tables.rows: null, but multi-hot arrays name no rows; set data.tables.rows")
        folder = Path(path)
        days = [
            _open_day(folder, day, _map_npz(folder / f"day_{day}_sparse_multi_hot.npz"))
            for day in _days(folder, "sparse_multi_hot.npz")
        ]
        first = [ids.shape[1] for ids in days[0].ids]
        for day in days:
            if (found := [ids.shape[1] for ids in day.ids]) != first:
                raise InputError(f"{day.name}: bags of {found} ids, but the first day's have {first}; take one day out")
        super().__init__(days, _per_table(tables.rows), tables.max_rows)

    def __reduce__(self) -> tuple:
        return type(self), self._arguments, {"_borders": self._borders}


def open_criteo(config: DataConfig, path: str) -> CriteoText | CriteoNpy | CriteoMultihot:
    """Open the samples at `path` (config.path or config.eval_path) in the format that config.kind names.

    Raises:
        InputError: if they do not exist, are empty or break their format.
    """
    kinds = {"criteo_tsv": CriteoText, "criteo_npy": CriteoNpy, "criteo_multihot": CriteoMultihot}
    return kinds[config.kind](path, config.tables, config.bad_rows)


def _per_table(rows: int | Sequence[int]) -> list[int]:
    return [rows] * CRITEO_TABLES if isinstance(rows, int) else list(rows)


def _cap(rows: Sequence[int], max_rows: int | None) -> list[int]:
    capped = [min(table_rows, max_rows or table_rows) for table_rows in rows]
    if max(capped) >= 2**31:
        raise InputError(f"data.tables.rows: {max(capped)} overflows int32 ids; stay below {2**31}")
    return capped


def _days(folder: Path, sparse: str) -> list[int]:
    """Return, in ascending order, the days of which `folder` holds dense.npy, labels.npy or `sparse`."""
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; give the one that holds day_0_{sparse} and its like")
    name = re.compile(rf"day_(\d+)_(dense\.npy|labels\.npy|{re.escape(sparse)})")
    days = {int(match[1]) for file in folder.iterdir() if (match := name.fullmatch(file.name))}
    if not days:
        raise InputError(f"{folder}: holds no day_0_{sparse} nor its like; give another folder or data.kind")
    return sorted(days)


def _open_day(folder: Path, day: int, ids: Sequence[np.ndarray] | np.ndarray) -> _Day:
    name = str(folder / f"day_{day}")
    dense = _map_npy(day_file(folder, day, "dense"), np.float32, CRITEO_DENSE)
    labels = _map_npy(day_file(folder, day, "labels"), np.int32, 1)[:, 0]
    if len(lengths := {len(dense), len(labels), *map(len, ids)}) > 1:
        raise InputError(
            f"{name}: files of {sorted(lengths)} samples, but dense, labels and sparse must agree; replace them"
        )
    return _Day(name, labels, dense, ids)


def _map_npy(file: Path, dtype: type, columns: int) -> np.ndarray:
    """Map the [n, columns] array (or [n], for one column) of an npy file."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, *NOT_NPY) as error:
        raise _unreadable(file, error) from error
    return _checked(array, file, dtype, columns)


def _unreadable(file: Path, error: Exception) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{file}: missing, but a day has dense, labels and sparse; add it or take the day out")
    return InputError(f"{file}: not a whole numpy file ({error}); replace it")


def _map_npz(file: Path) -> list[np.ndarray]:
    """Map the members 0.npy .. 25.npy of an npz file, each from its place in the file."""
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


def _checked(array: np.ndarray, file: Path, dtype: type, columns: int | None, member: str = "") -> np.ndarray:
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
