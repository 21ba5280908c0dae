"""Rows of measurements: appended to a CSV file, each with the environment it was measured in, and printed."""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.doctor import environment
from dlrm_overlap.observe.text_table import format_table


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append `row` to the CSV file `path`; see `append_rows`."""
    append_rows(path, [row])


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append `rows`, each with the environment, to the CSV file `path`; first the header if the file is new or empty.

    Raises:
        InputError: if the file has other columns or cannot be written.
    """
    found = environment()
    full = [{key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    full = [row | found for row in full]
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


def _show(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(
    rows: Sequence[Mapping[str, Any]], faults: Sequence[str], output: Path, headline: str, columns: Sequence[str]
) -> None:
    """Print the faults to standard error; print the rows as a table and append them to the CSV file `output`.

    Args:
        rows: if there is none, only the faults are printed.
        faults: one line each.
        output: see `append_row`.
        headline: printed above the table.
        columns: those that the table has, as far as a row has a value there. The CSV file has all columns.

    Raises:
        InputError: if the file has other columns or cannot be written.
    """
    for fault in faults:
        print(f"dlrm-overlap: {fault}", file=sys.stderr)
    if not rows:
        return
    print(headline)
    print_table(rows, columns)
    append_rows(output, rows)
    print(f"rows in {output}")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print `rows` as a table of those of `columns` in which a row has a value."""
    filled = [column for column in columns if any(row.get(column) is not None for row in rows)]
    print(format_table([filled, *([_show(row.get(column)) for column in filled] for row in rows)]))
