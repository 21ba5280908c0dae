"""Rows of measurements: printed, and appended to a CSV file with their command and the environment."""

import csv
import itertools
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.options import FIGURES
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.launching.text_table import format_table

_SHAPE = ("tables", "rows", "dim", "multi_hot", "arch", "precision", "global_batch", "world_size")


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command_line() -> str:
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return shlex.join(["dlrm-overlap", *sys.argv[1:], "--nproc", str(ranks)])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if there is no such file. Raises an `InputError` if it is another file."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        fault = getattr(error, "strerror", None) or "not a CSV file"
        raise InputError(f"--output: {path} cannot be read ({fault}); give another file") from None


def rows_to_continue(path: Path, work: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the rows of an earlier call, which a resumed one continues.

    Raises:
        InputError: if a row has another value in a column of `work`.
    """
    rows = read_rows(path)
    for row, (name, value) in itertools.product(rows, work.items()):
        if (earlier := row.get(name, "unknown")) != _written(value):
            raise InputError(
                f"--output: {path} has rows with {name} {earlier}, and this run has {_written(value)}; give another "
                f"file, or the same configuration and options as its command: {row.get('command', 'unknown')}"
            )
    return rows


def check_columns(path: Path, kind: str, has_gpus: bool) -> None:
    """Raise an `InputError` if the rows of a file cannot have the columns of this benchmark on this machine.

    Called before anything is measured, since `append_rows` would write them to another file.
    """
    first = next(iter(read_rows(path)), None)
    if first is None:
        return
    other = FIGURES.get(first.get("kind", ""))
    if other and other.module != FIGURES[kind].module:
        found = f"rows of bench {first['kind']}"
    elif "torch" in first and ("gpu" in first) != has_gpus:
        found = "rows of a machine " + ("without GPUs" if has_gpus else "with GPUs")
    else:
        return
    raise InputError(f"--output: {path} has {found}, which have other columns; give another file")


def folder_of_runs(output: Path) -> Path:
    """Return the folder, next to `output`, of the runs whose rows that file has."""
    return output.with_suffix("") if output.suffix else output.with_name(f"{output.name}_runs")


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]], command: str | None = None) -> Path:
    """Append `rows` by `append_csv`, with the environment and `command`, by default the command of this process."""
    about = {"command": command or _command_line(), **environment()}
    written = [{**{key: _written(value) for key, value in row.items()}, **about} for row in rows]
    return append_csv(path, written, "--output")


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]], option: str) -> Path:
    """Append `rows`, at least one, to the CSV file that `option` names; return the path of the file that has them.

    Cells of columns that only the file has stay empty. If the file lacks a column of the rows, which may have taken
    minutes to measure, they are appended to a file next to it, with `_2`, `_3`, .. after its name, and standard error
    says so.

    Raises:
        InputError: if the file cannot be read or written.
    """
    names = list(dict.fromkeys(itertools.chain(*rows)))
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    files = ((file, _header(file)) for file in itertools.chain([path], numbered))
    try:
        output, header = next((file, header) for file, header in files if set(names) <= set(header or names))
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a", newline="") as file:
            writer = csv.DictWriter(file, header or names)
            if not header:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InputError(f"{option}: {path} cannot be written ({error.strerror}); give another file") from None
    if output != path:
        lacks = ", ".join(name for name in names if name not in _header(path))
        print(f"dlrm-overlap: {option}: {path} has no column {lacks}; the rows are in {output}", file=sys.stderr)
    return output


def _header(path: Path) -> list[str]:
    """Return the names of a CSV file's columns; none if it is empty or does not exist."""
    if not path.exists() or path.stat().st_size == 0:
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file))


def report(rows: Sequence[Mapping[str, Any]], faults: Sequence[str], output: Path, columns: Sequence[str]) -> None:
    """Print faults to standard error and rows as a table of `columns`, and append the rows by `append_rows`."""
    for fault in faults:
        print(f"dlrm-overlap: {fault}", file=sys.stderr)
    if not rows:
        return
    print(", ".join(f"{name.replace('_', ' ')} {rows[0][name]}" for name in _SHAPE if rows[0].get(name) is not None))
    print_table(rows, columns)
    print(f"rows in {append_rows(output, rows)}")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    filled = [column for column in columns if any(row.get(column) is not None for row in rows)]
    print(format_table([filled, *([_written(row.get(column)) or "-" for column in filled] for row in rows)]))
