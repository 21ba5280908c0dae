"""Rows of measurements: printed, appended to a CSV file with command and environment, and read again for pages."""

import csv
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.launching.text_table import format_table

Row = Mapping[str, str]

_SHAPE = ("tables", "rows", "dim", "multi_hot", "arch", "precision", "global_batch", "world_size")
_VERSIONS = ("torch", "nccl", "fbgemm", "torchrec", "triton")


def _written(value: Any) -> str:
    """Return a value as it is in a CSV file: numbers with four digits, nothing for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command_line() -> str:
    """Return the command that this process is a rank of, as a user would type it."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return shlex.join(["dlrm-overlap", *sys.argv[1:], "--nproc", str(ranks)])


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]], command: str | None = None) -> None:
    """Append `rows`, each with its command, by default this process's own, and the environment, to a CSV file.

    Raises:
        InputError: if the file has other columns or cannot be written.
    """
    about = {"command": command or _command_line(), **environment()}
    full = [{**{key: _written(value) for key, value in row.items()}, **about} for row in rows]
    header = list(full[0])
    new = not path.exists() or path.stat().st_size == 0
    if not new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
    if any(set(header) != set(row) for row in full):
        raise InputError(f"--output: {path} has other columns than this benchmark's rows; give another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, header)
            if new:
                writer.writeheader()
            writer.writerows(full)
    except OSError as error:
        raise InputError(f"--output: {path} cannot be written ({error.strerror}); free it, or give another") from None


def report(
    rows: Sequence[Mapping[str, Any]], faults: Sequence[str], output: Path, columns: Sequence[str], title: str = ""
) -> None:
    """Print the faults to standard error; print the rows as a table of `columns`, and append them to `output`.

    Raises:
        InputError: if the file has other columns or cannot be written.
    """
    for fault in faults:
        print(f"dlrm-overlap: {fault}", file=sys.stderr)
    if not rows:
        return
    shape = [f"{name.replace('_', ' ')} {rows[0][name]}" for name in _SHAPE if rows[0].get(name) is not None]
    print(", ".join([title] * bool(title) + shape))
    print_table(rows, columns)
    append_rows(output, rows)
    print(f"rows in {output}")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print `rows` as a table of those of `columns` in which a row has a value."""
    filled = [column for column in columns if any(row.get(column) is not None for row in rows)]
    print(format_table([filled, *([_written(row.get(column)) or "-" for column in filled] for row in rows)]))


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
    if not rows:
        raise InputError(f"{path}: no rows; remove it, or measure again")
    return Measured(path.stem, rows[0].get("kind") or path.stem, rows)


def hardware(rows: Sequence[Row]) -> str:
    """Return a line: GPUs, or CPU and that it is a rehearsal, then versions and commits."""
    first = rows[0]
    commits = dict.fromkeys(f"commit {commit}" for row in rows if (commit := row.get("commit")))
    parts = [first.get("gpu") or f"CPU, a rehearsal and no figure: {first.get('cpu', 'unknown')}"]
    return ", ".join([*parts, *(f"{name} {first[name]}" for name in _VERSIONS if first.get(name)), *commits])
