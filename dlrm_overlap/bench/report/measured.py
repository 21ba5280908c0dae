"""Rows of measurements as the CSV files of `dlrm-overlap bench` hold them, read again for plots and tables."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrm_overlap.config import InputError

Row = Mapping[str, str]
Run = Mapping[str, Row]
"""contender -> its row, of contenders that were measured against each other"""

_SHAPE = (
    *("arch", "optimizer", "pinned_host", "world_size", "tables"),
    *("rows", "dim", "multi_hot", "zipf_alpha", "global_batch"),
)
_VERSIONS = ("torch", "nccl", "fbgemm", "torchrec", "triton")


class Measured(NamedTuple):
    """The rows of one CSV file."""

    name: str
    """the file's name without .csv"""
    kind: str
    """the figure that it has rows of, as `dlrm-overlap bench KIND` names it; the file's name where rows do not say"""
    rows: Sequence[Row]


def read_measured(path: Path) -> Measured:
    """Return the rows of the CSV file `path`.

    Raises:
        InputError: if it cannot be read, or has no rows.
    """
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as CSV ({error}); give rows that bench has written") from None
    if not rows or any(None in row or None in row.values() for row in rows):
        raise InputError(f"{path}: no rows, or not as many cells as columns; remove it, or measure again")
    return Measured(path.stem, rows[0].get("kind") or path.stem, rows)


def runs(rows: Iterable[Row]) -> list[Run]:
    """Return the runs in the file's order: one ends where the shape changes or a contender comes again.

    Contenders of a step take turns in groups, whose rows have `busy_ms`. The last one is in each group, and the run has
    its first row.
    """
    found: list[dict[str, Row]] = []
    last = None
    for row in rows:
        shape = [row.get(name) for name in _SHAPE]
        again = last is not None and row["contender"] in found[-1]
        if shape != last or (again and "busy_ms" not in row):
            found.append({})
        found[-1].setdefault(row["contender"], row)
        last = shape
    return [*found]


def trusted(row: Row) -> bool:
    """Return whether the row's outputs or losses were those of the reference, so that its time may be compared."""
    if row.get("agrees") == "False":
        return False
    return row.get("speedup") != "" if "speedup" in row else True


def hardware(rows: Sequence[Row]) -> str:
    """Return a line: GPUs, or CPU and that it is a rehearsal, then versions and commits."""
    first = rows[0]
    commits = list(dict.fromkeys(commit for row in rows if (commit := row.get("commit"))))
    parts = [first.get("gpu") or f"CPU, a rehearsal and no figure: {first.get('cpu', 'unknown')}"]
    parts += [f"{name} {first[name]}" for name in _VERSIONS if first.get(name)]
    return ", ".join([*parts, *(f"commit {commit}" for commit in commits)])


def milliseconds(value: float | None) -> str:
    """Return a time in ms as the pages have it: two decimals, three below 1 ms; - for none."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value >= 0.995 else f"{value:.3f}" if value >= 0.01 else f"{value:.2g}"
