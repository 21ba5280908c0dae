"""Compares four models of MovieLens-100k on its last weeks. It needs scikit-learn (the extra `examples`).

    python -m examples.movielens.compare movielens
    python -m examples.movielens.compare movielens --validation    # on the last weeks before the split

The folder has the tables of table.py, and samples/ and training/ by `prepare` (docs/movielens.md). The two models of
scikit-learn are deterministic; the others are trained once per seed. `--rows` names a folder for results.csv, and for
curves.csv of seed 0.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from scipy import sparse  # pyright: ignore[reportMissingImports]
from sklearn.ensemble import HistGradientBoostingClassifier  # pyright: ignore[reportMissingImports]
from sklearn.linear_model import LogisticRegression  # pyright: ignore[reportMissingImports]
from sklearn.preprocessing import StandardScaler  # pyright: ignore[reportMissingImports]

from dlrm_overlap.launching.environment import environment
from dlrm_overlap.observe.metrics import evaluation_metrics
from examples.movielens.table import COLUMNS, SPLIT

VALIDATION = datetime(1998, 3, 2, tzinfo=UTC)
CONFIG = Path(__file__).with_name("dlrm.yaml")
ATTENTION = ["--model.sequence.history", "6", "--model.sequence.candidate", "1"]
DLRMS = {"DLRM": [], "DLRM with attention": ATTENTION}
METRICS = ("auroc", "ne", "calibration")
CURVES = ("train/loss", "eval/loss", "eval/auroc")
Row = dict[str, Any]


def train(name: str, folder: Path, split: datetime, seed: int, options: Sequence[str]) -> tuple[Row, list[Row]]:
    """Train a DLRM in a process of its own; return its metrics on the samples from `split` on, and its curves."""
    run = folder / "compared" / f"{name.replace(' ', '_').lower()}_{split:%m%d}_{seed}"
    samples = folder / ("samples" if split == SPLIT else "training")
    command = [sys.executable, "-m", "dlrm_overlap", "train", "--config", str(CONFIG), "--nproc", "1"]
    command += ["--data.path", str(samples), "--data.eval_from", f"{split:%Y-%m-%d}"]
    command += ["--train.seed", str(seed), "--data.seed", str(seed)]
    command += ["--log.dir", str(run.parent), "--log.name", run.name, "--log.overwrite", "true"]
    subprocess.run([*command, *DLRMS[name], *options], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curves = [
        {"name": name, "step": line["step"], "metric": metric, "value": f"{line[metric]:.5f}"}
        for metric in CURVES
        for line in lines
        if metric in line
    ]
    return {metric: summary[f"eval_{metric}"] for metric in METRICS}, curves


def logistic_regression(table: pa.Table, is_training: np.ndarray) -> np.ndarray:
    """Return the logits [n] of all rows, by an indicator per value of each column or list, and standardised numbers."""
    columns = ("user", "movie", "gender", "occupation", "year", "genres", "history")
    numbers = _numbers(table, is_training)
    features = sparse.hstack([*(_one_hot(table[name]) for name in columns), numbers]).tocsr()
    model = LogisticRegression(C=0.0005, max_iter=300)
    model.fit(features[is_training], table["liked"].to_numpy()[is_training])
    return model.decision_function(features)


def gradient_boosting(table: pa.Table, is_training: np.ndarray) -> np.ndarray:
    """Return the logits [n] of all rows, by numbers, the year, categories, genres, and counts of the histories.

    Counts and means so far stand for users and movies.
    """
    codes = [table[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in ("gender", "occupation")]
    year = table["year"].to_numpy()
    genres = _one_hot(table["genres"]).toarray()
    features = np.column_stack([*codes, year, genres, _numbers(table, is_training), _history_counts(table)])
    categories: Any = {"categorical_features": [0, 1], "early_stopping": False}  # typed as str in scikit-learn
    model = HistGradientBoostingClassifier(learning_rate=0.05, max_iter=100, max_leaf_nodes=31, **categories)
    model.fit(features[is_training], table["liked"].to_numpy()[is_training])
    return np.asarray(model.decision_function(features))


def _numbers(table: pa.Table, is_training: np.ndarray) -> np.ndarray:
    """Return the numbers [n, 5], standardised by the training rows."""
    counts = [np.log1p(table[name].to_numpy()) for name in ("age", "user_count", "movie_count")]
    numbers = np.column_stack([*counts, *(table[name].to_numpy() for name in ("user_mean", "movie_mean"))])
    return StandardScaler().fit(numbers[is_training]).transform(numbers)


def _history_counts(table: pa.Table) -> np.ndarray:
    """Return counts [n, 4] of the history's movies.

    They are the liked movies; the others; the genres that any of them have in common with the row's movie; and these
    genres of liked movies minus those of the others.
    """
    rows = table.select(["movie", "genres", "history"]).to_pylist()
    genres = {str(row["movie"]): set(row["genres"]) for row in rows}
    counts = np.zeros((len(rows), 4))
    for count, row in zip(counts, rows, strict=True):
        for sign, movie in ((each[0], each[1:]) for each in row["history"]):
            common = len(genres[movie].intersection(row["genres"]))
            count += (1, 0, common, common) if sign == "+" else (0, 1, common, -common)
    return counts


def _one_hot(column: pa.ChunkedArray) -> Any:
    """Return a sparse matrix [n, V] of V distinct values, 1 for the value of a row, or for those of its list."""
    array = column.combine_chunks()
    is_list = pa.types.is_list(array.type)
    lengths = np.diff(np.array(array.offsets)) if is_list else np.ones(len(array), np.int64)
    codes = np.array((array.flatten() if is_list else array).dictionary_encode("encode").indices)
    return sparse.csr_matrix((np.ones(len(codes)), codes, np.concatenate(([0], lengths.cumsum()))))


BASELINES = {"logistic regression": logistic_regression, "gradient boosting": gradient_boosting}


def compare(folder: Path, split: datetime, seeds: int, options: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Return a row per model and seed, and the curves of seed 0; print each row."""
    table = parquet.read_table(folder / ("ratings.parquet" if split == SPLIT else "training.parquet"))
    seconds = table["time"].cast(COLUMNS["time"]).cast(pa.int64()).to_numpy()
    is_training = seconds < split.timestamp()
    labels = torch.tensor(table["liked"].to_numpy()[~is_training]).float()
    rows: list[Row] = []
    curves: list[Row] = []

    def add(model: str, seed: int | str, metrics: Row) -> None:
        rows.append({"name": model, "seed": seed} | {key: f"{metrics[key]:.5f}" for key in METRICS})
        print(f"{model:<20} {seed!s:>4}  " + "  ".join(f"{key} {metrics[key]:.4f}" for key in METRICS), flush=True)

    for name, logits_of in BASELINES.items():
        logits = torch.tensor(logits_of(table, is_training)[~is_training]).float()
        add(name, "", evaluation_metrics(logits, labels))
    for name in DLRMS:
        for seed in range(seeds):
            metrics, found = train(name, folder, split, seed, options)
            add(name, seed, metrics)
            curves += found if seed == 0 else []
    for model in dict.fromkeys(row["name"] for row in rows):
        found = {key: [float(row[key]) for row in rows if row["name"] == model] for key in METRICS}
        print(f"{model:<20} mean  " + "  ".join(f"{key} {np.mean(each):.4f}" for key, each in found.items()))
    return rows, curves


def write_rows(path: Path, rows: Sequence[Row], origin: Row) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows([row | origin for row in rows])


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Compare models of MovieLens-100k; other options are those of train.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of the DLRMs")
    parser.add_argument("--validation", action="store_true", help="train up to 1998-03-02, evaluate up to the split")
    parser.add_argument("--rows", type=Path, help="folder for results.csv and curves.csv")
    values, options = parser.parse_known_args(argv)
    split = VALIDATION if values.validation else SPLIT
    try:
        rows, curves = compare(values.folder, split, values.seeds, options)
    except OSError as error:
        parser.error(
            f"{error}: cannot be read; make the table and samples in {values.folder}, as docs/movielens.md does"
        )
    except subprocess.CalledProcessError as error:  # train has said why
        sys.exit(error.returncode)
    if values.rows:
        import sklearn  # pyright: ignore[reportMissingImports]

        found = environment()
        origin = {"command": " ".join(["python -m examples.movielens.compare", *argv]), "sklearn": sklearn.__version__}
        origin |= {key: found.get(key, "") for key in ("torch", "torchrec", "cpu", "commit")}
        values.rows.mkdir(parents=True, exist_ok=True)
        write_rows(values.rows / "results.csv", rows, origin)
        write_rows(values.rows / "curves.csv", curves, origin)


if __name__ == "__main__":
    main(sys.argv[1:])
