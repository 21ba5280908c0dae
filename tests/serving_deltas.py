"""Measures `Scorer.apply`, and how ids are looked up; writes docs/results/serving/deltas.csv.

    python -m tests.serving_deltas                                 # some two minutes on two cores

The model has a table of any id with 2^20 rows of 64 float32, 256 MB. The deltas are made up, and replace rows of
random ids. While they are applied, another thread scores requests of 32 rows, one at a time.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from dlrm_overlap import Scorer
from dlrm_overlap.bench.rows import append_rows, print_table
from dlrm_overlap.checkpoint.delta_files import (
    DELTA_MANIFEST,
    UPDATE,
    ChangedRows,
    DeltaManifest,
    state_of_checkpoint,
    write_changes,
)
from dlrm_overlap.checkpoint.extents import Extent
from dlrm_overlap.checkpoint.manifest import locate_checkpoint, read_manifest, write_manifest
from dlrm_overlap.checkpoint.storage import read_weights, save_extents
from dlrm_overlap.cli import main as run
from dlrm_overlap.kernels.ids.id_map import SEGMENT, mix, unsigned_remainder
from dlrm_overlap.predict.id_rows import IdRows
from tests.conftest import ROOT, run_cli

OUTPUT = ROOT / "docs" / "results" / "serving" / "deltas.csv"
ROWS, DIM, SAMPLES, CHANGED = 1 << 20, 64, 4096, (10_000, 100_000, 1_000_000)
LOOKED_UP, TIMES = (1, 1024), 500
SCHEMA = "labels: {click: {}}\ncategorical: {user: {type: int, any: true}}\n"


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=style).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        measured = [*lookups(), *updates(Path(folder))]
    OUTPUT.unlink(missing_ok=True)
    append_rows(OUTPUT, measured, "python -m tests.serving_deltas")
    print_table(measured, list(measured[0]))


def lookups() -> Iterator[dict[str, Any]]:
    """Yield the rows of the file for two ways to find the rows of ids among those of `ROWS` rows."""
    rng = np.random.default_rng(0)
    ids, stored = place(rng.integers(-(2**62), 2**62, ROWS))
    by_buckets, order = IdRows(stored), np.argsort(mix(ids))
    hashes, rows = mix(ids)[order], np.flatnonzero(stored != -1)[np.argsort(stored[stored != -1])]

    def by_search(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        hashed = mix(wanted)
        at = np.minimum(np.searchsorted(hashes, hashed), len(hashes) - 1)
        known = hashes[at] == hashed
        initial = unsigned_remainder(hashed, ROWS // SEGMENT) * SEGMENT + SEGMENT - 1
        return np.where(known, rows[at], initial), known

    for count in LOOKED_UP:
        wanted = [
            np.append(rng.choice(ids, count - count // 10), rng.integers(0, 2**62, count // 10)) for _ in range(TIMES)
        ]
        for name, look_up in (("its bucket", by_buckets.rows_of), ("binary search", by_search)):
            for each in wanted[:20]:
                np.testing.assert_array_equal(look_up(each), by_buckets.rows_of(each))
            yield _row(f"look up ids by {name}", count, [_seconds(look_up, each) for each in wanted])


def place(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return those of `ids` that have a row, and the hashes that a table of `ROWS` rows stores, in arbitrary slots."""
    buckets = unsigned_remainder(mix(ids), ROWS // SEGMENT)
    order = np.argsort(buckets, kind="stable")
    ids, buckets = ids[order], buckets[order]
    slots = np.arange(len(ids)) - np.searchsorted(buckets, buckets)
    has_room = slots < SEGMENT - 1
    stored = np.full(ROWS, -1, np.int64)
    stored[(buckets * SEGMENT + slots)[has_room]] = mix(ids[has_room])
    return ids[has_room], stored


def updates(folder: Path) -> Iterator[dict[str, Any]]:
    """Train a model, and yield the rows of the file for deltas of it."""
    checkpoint = train(folder)
    requests = {"user": list(range(32))}
    idle = Scorer(checkpoint)
    yield _row("a request, no delta", 32, [_seconds(idle, requests) for _ in range(TIMES)])
    del idle
    for changed in CHANGED:
        delta = folder / f"delta_{changed}"
        write_delta(checkpoint, delta, changed)
        scorer = Scorer(checkpoint)
        scorer(requests)
        gc.collect()
        before, of_cpu = _reset_peak(), time.process_time()
        seconds = _seconds(scorer.apply, delta)
        yield _row("apply a delta", changed, [seconds], time.process_time() - of_cpu, _peak() - before)
        yield _row("a request, while it is applied", 32, _while_applying(Scorer(checkpoint), requests, delta))


def _while_applying(scorer: Scorer, requests: Any, delta: Path) -> list[float]:
    """Return the seconds of each request of a thread while another one applies a delta."""
    ended, times = Event(), list[float]()

    def score() -> None:
        while not ended.is_set():
            times.append(_seconds(scorer, requests))

    thread = Thread(target=score)
    thread.start()
    scorer.apply(delta)
    ended.set()
    thread.join()
    return times


def train(folder: Path) -> Path:
    """Return a checkpoint of a model that was trained for two steps."""
    rng = np.random.default_rng(0)
    table = pa.table({"click": rng.integers(0, 2, SAMPLES), "user": rng.integers(0, 2**62, SAMPLES)})
    parquet.write_table(table, folder / "table.parquet")
    (folder / "schema.yaml").write_text(SCHEMA)
    days = [str(folder / "table.parquet"), str(folder / "days"), "--schema", str(folder / "schema.yaml")]
    if run(["prepare", "table", *days]):
        raise SystemExit("no samples")
    options = ["--data.kind", "prepared", "--data.path", str(folder / "days"), "--train.steps", "2", "--nproc", "1"]
    options += ["--train.device", "cpu", "--embedding.backend", "pgas", "--embedding.id_tables.rows", str(ROWS)]
    options += ["--model.dim", str(DIM), "--model.bottom_mlp", f"[{DIM}]", "--log.dir", str(folder)]
    done = run_cli("train", *options, "--log.name", "run")
    if done.returncode:
        raise SystemExit(done.stderr)
    return locate_checkpoint(folder / "run", "checkpoint")


def write_delta(checkpoint: Path, delta: Path, changed: int) -> None:
    """Write a delta that follows `checkpoint`, with new ids and weights of `changed` rows."""
    rng, manifest, weights = np.random.default_rng(1), read_manifest(checkpoint), read_weights(checkpoint)
    (table,) = (name for name in weights if ".embedding_bags." in name)
    ids, stored = place(rng.integers(-(2**62), 2**62, ROWS))
    rows, order = np.flatnonzero(stored != -1), rng.permutation(len(ids))[:changed]
    keys, places = torch.from_numpy(ids[order]), torch.from_numpy(rows[order])
    values = torch.randn(len(order), DIM)
    dense = [
        Extent(("model", name), tuple(each.shape), (0,) * each.dim(), each)
        for name, each in weights.items()
        if name.split(".")[1] in ("bottom", "head")
    ]
    files = save_extents(delta, dense)
    of_table = ChangedRows(table, "t_00", UPDATE, 0, keys, places, values)
    name, step = "tables_rank0.parquet", manifest.step + 1
    files[name] = write_changes(delta / name, [of_table], step, 0, 1, "float32")
    base = state_of_checkpoint(manifest)
    write_manifest(delta, DeltaManifest(step, manifest.shape, files=files, base=base), DELTA_MANIFEST)


def _seconds(work: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def _reset_peak() -> float:
    """Return the process's memory in MB, from which `_peak` counts again."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) / 1000


def _row(
    what: str, rows: int, times: list[float], cpu_s: float | None = None, extra_mb: float | None = None
) -> dict[str, Any]:
    p99 = statistics.quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    return {
        "what": what,
        "rows": rows,
        "median_ms": 1e3 * statistics.median(times),
        "p99_ms": 1e3 * p99,
        "greatest_ms": 1e3 * max(times),
        "cpu_ms": None if cpu_s is None else 1e3 * cpu_s,
        "extra_mb": extra_mb,
    }


if __name__ == "__main__":
    main()
