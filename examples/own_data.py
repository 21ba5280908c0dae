"""Trains on your own table, from files to an evaluated model, by three commands.

    python examples/own_data.py --folder own_data --nproc 2        # on GPUs, or on a CPU if there are none

The tables are created here as Parquet files: samples.parquet, for training, and later.parquet, the days after it. Their
40 columns are a time, two labels, 8 numbers, 28 strings and a list. docs/configuration.md describes schemas.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dlrm_overlap.cli import main

FIRST_S, EVERY_S = 1793491200, 120  # 2026-11-01, as a Unix time; a sample every two minutes
NUMBERS, TEXTS = [f"number_{i}" for i in range(8)], [f"text_{i}" for i in range(28)]
SCHEMA = "\n".join(
    [
        "time: at",
        "labels:",
        "  click: {}",
        "  purchase: {weight: 0.5}",
        "dense:",
        *(f"  {name}: {{}}" for name in NUMBERS),
        "categorical:",
        "  words: {list: true, rows: 500}",
        *(f"  {name}: {{min_count: 3}}" for name in TEXTS[:14]),  # a vocabulary, built by `prepare`
        *(f"  {name}: {{rows: 200}}" for name in TEXTS[14:]),  # hashed
    ]
)


def make_table(rows: int, first: int = 0) -> pa.Table:
    """Return samples [first, first + rows), whose labels depend on the first number, the first string and the list."""
    rng = np.random.default_rng(first)
    numbers, texts = rng.normal(size=(8, rows)), rng.zipf(1.5, (28, rows)) % 100
    words = [[f"w{word}" for word in rng.integers(0, 50, rng.integers(0, 8))] for _ in range(rows)]
    score = numbers[0] + (texts[0] % 3 - 1.0) + [("w1" in each) - 0.1 for each in words]
    columns = {"click": rng.random(rows) < 1 / (1 + np.exp(-score))}
    columns["purchase"] = columns["click"] & (rng.random(rows) < 0.3)
    columns = {name: column.astype(np.int8) for name, column in columns.items()}
    columns |= {"at": FIRST_S + EVERY_S * np.arange(first, first + rows)}
    columns |= dict(zip(NUMBERS, numbers, strict=True))
    columns |= {name: [f"v{value}" for value in each] for name, each in zip(TEXTS, texts, strict=True)}
    return pa.table(columns | {"words": words})


def run(folder: Path, rows: int, options: list[str]) -> int:
    """Write a table of `rows` samples in `folder`, prepare it, and train with further `options` of train."""
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(make_table(rows), folder / "samples.parquet")
    parquet.write_table(make_table(rows // 10, first=rows), folder / "later.parquet")
    (folder / "schema.yaml").write_text(SCHEMA + "\n")
    table, days = str(folder / "samples.parquet"), str(folder / "days")
    if code := main(["prepare", "table", table, days, "--schema", str(folder / "schema.yaml")]):
        return code
    source = ["--data.kind", "prepared", "--data.path", days]
    model = ["--model.top_mlp", "[64, 32, 2]"]  # a logit for each label
    return main(["train", *source, *model, "--log.dir", str(folder / "runs"), *options])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on your own table; other options are passed to train.")
    parser.add_argument("--folder", type=Path, default=Path("own_data"))
    parser.add_argument("--rows", type=int, default=20_000)
    known, rest = parser.parse_known_args()
    sys.exit(run(known.folder, known.rows, rest))
