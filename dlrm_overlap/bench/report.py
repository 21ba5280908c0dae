"""Rows of measurements, each with what it was measured on."""

import csv
from pathlib import Path
from typing import Any

from dlrm_overlap.config import InputError
from dlrm_overlap.doctor import environment


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append `row` and the environment to the CSV file `path`, making it with a header if it is not there.

    Raises:
        InputError: if the file has other columns.
    """
    full = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()} | environment()
    header = list(full)
    if path.exists():
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if set(header) != set(full):
            raise InputError(f"--output: {path} has other columns than this benchmark's rows; give another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, header)
        if new:
            writer.writeheader()
        writer.writerow(full)
