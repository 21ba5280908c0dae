"""Tables of samples, parsed when they are opened and held in memory."""

import logging
from pathlib import Path

import numpy as np

from dlrm_overlap.config import InputError
from dlrm_overlap.data.days import Day, Days
from dlrm_overlap.data.encoder import Encoder, Learnt
from dlrm_overlap.data.schema import Schema
from dlrm_overlap.data.table_files import BLOCK_BYTES, read_rows, table_files

log = logging.getLogger("dlrm_overlap")


def read_table(
    path: str | Path,
    schema: Schema,
    max_rows: int | None = None,
    bad_rows: str = "error",
    block_bytes: int = BLOCK_BYTES,
) -> tuple[Days, Days | None]:
    """Return the samples of `path`, a file or a folder, and those held out by their time, if `schema` has one.

    A sample takes 4 bytes a label, a dense feature and an id. With `bad_rows` skip, bad rows are left out, and the
    log says how many.

    Raises:
        InputError: if something is to be learnt of all samples, and as `read_rows` does.
    """
    if schema.learns:
        raise InputError(
            "data.schema: has a min_count or a standardised column, which are learnt of all samples; run "
            "`dlrm-overlap prepare table`, and set data.kind prepared"
        )
    encoder, skipped = Encoder(schema, Learnt()), 0
    days: tuple[list[Day], list[Day]] = ([], [])
    for file in table_files(Path(path), schema):
        for raw in read_rows(file, schema, bad_rows == "skip", block_bytes):
            skipped += raw.skipped
            for part, wanted in zip(days, (~raw.held_out, raw.held_out), strict=True):
                if (count := np.count_nonzero(wanted)) > 0:
                    part.append(encoder.encode(raw if count == len(wanted) else raw.take(wanted), str(file)))
    if skipped:
        known = sum(len(day.labels) for part in days for day in part)
        log.warning("data.bad_rows: %s: %d of %d rows are no samples, and left out", path, skipped, known + skipped)
    if not all(days if schema.time else days[:1]):
        raise InputError(f"{path}: time.held_out_from leaves no samples on one side of it; take another")
    opened = [Days(part, encoder.rows, max_rows) for part in days if part]
    for each in opened:
        each.label_names, each.label_weights = schema.tasks
    return opened[0], opened[1] if schema.time else None
