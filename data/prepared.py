"""A folder of prepared samples: files of bytes, and meta.json, which says what they hold.

    records     uint8 [n, bytes of a record], see `records`
    ends_t      int64 [n], of each table t whose bags differ in size, where each sample's bag ends in
    list_t      int32 [m], the ids of these bags, of which no record has any

The last samples are those to evaluate on, if `prepare` knew which these are. meta.json is written when all else is on
disk, so a folder has it or is refused.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_overlap.config import InputError, TablesConfig
from dlrm_overlap.data.days import Day, Days, Ragged
from dlrm_overlap.data.records import Layout, Packed
from dlrm_overlap.launching.files import write_json

_META = "meta.json"


class Prepared(Days):
    """The samples of a folder that `dlrm-overlap prepare` has written, mapped, as one day."""

    cure = id_cure = "prepare the samples again"

    def __init__(self, path: str | Path, tables: TablesConfig):
        """Map the folder `path`.

        Raises:
            InputError: if there is no meta.json of this version; if `tables` has other rows than the ids were made for,
                and does not fold both to the same; or if a file is missing or of another size.
        """
        folder = Path(path)
        try:
            layout = Layout(**json.loads((folder / _META).read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(
                f"{folder}: has no {_META} of this version's `dlrm-overlap prepare` ({error}); set data.path, or "
                f"data.eval_path, to a folder that it has written to its end, or data.kind to what this one holds"
            ) from None
        made, most = layout.rows, tables.max_rows or math.inf
        rows = tables.rows if isinstance(tables.rows, list) else [tables.rows or each for each in made]
        if [min(each, most) for each in rows] != [min(each, most) for each in made]:
            raise InputError(
                f"data.tables.rows: {rows}, but the ids of {folder} were made for {made} rows; set it to null, which "
                f"takes these, and to save memory fold the ids by data.tables.max_rows"
            )
        samples = layout.samples
        records = _map(folder / "records", "u1", (samples, layout.record_bytes))
        unpacked: list[Any] = [Packed(records, each) for each in layout.fields()]
        dense, labels, *ids = unpacked
        for t in layout.lists:
            ends = _map(folder / f"ends_{t}", "<i8", (samples,))
            ids.insert(t, Ragged(_map(folder / f"list_{t}", "<i4", (int(ends[-1]) if samples else 0,)), ends))
        super().__init__([Day(str(folder), labels, dense, ids, records)], made, tables.max_rows)
        self.held_out = layout.held_out
        self.labels = layout.labels
        self.packed = None if layout.lists else replace(layout, moduli=self._moduli)


def _map(file: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not file.is_file() or file.stat().st_size != size:
        raise InputError(f"{file}: not the {size} bytes that {_META} names; run `dlrm-overlap prepare` anew")
    # Torch warns of memory that is read-only, and a plain array slices faster than np.memmap.
    return np.asarray(np.memmap(file, dtype, "c", shape=shape)) if size else np.empty(shape, dtype)


@contextmanager
def new_folder(target: Path) -> Iterator[None]:
    """Make the folder `target`, which the block fills, and delete it again if the block fails.

    Raises:
        InputError: if it is there, or cannot be written to.
    """
    try:
        target.mkdir(parents=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(target)
            raise
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error.strerror}); delete it, or name another folder") from None


def write_samples(target: Path, layout: Layout, blocks: Iterable[Day]) -> Layout:
    """Write samples to `target`, and return `layout` with their number."""
    samples = 0
    ids = dict.fromkeys(layout.lists, 0)
    with ExitStack() as stack:
        names = ["records", *(f"{part}_{t}" for t in ids for part in ("ends", "list"))]
        files = {name: stack.enter_context((target / name).open("xb")) for name in names}
        for block in blocks:
            samples += len(block.labels)
            files["records"].write(layout.pack(block).data)
            for t in ids:
                values, sizes = block.bags(t, slice(0, len(block.labels)))
                files[f"ends_{t}"].write((ids[t] + sizes.cumsum()).astype("<i8").data)
                files[f"list_{t}"].write(values.astype("<i4").data)
                ids[t] += len(values)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    layout = replace(layout, samples=samples)
    write_json(target / _META, asdict(layout), "OUT")
    return layout
