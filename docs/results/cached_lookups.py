"""Print what a cache would explain of measured lookups, as Markdown: the table of `docs/simulator.md`.

Run it as `python docs/results/cached_lookups.py`. The simulator's lookup reads all rows from memory. Here rows that are
named again soon come from the cache, as often as the working-set approximation says. Its two rates are those with which
lookups of uniform ids take as long as measured: of large tables on two GPUs (sweep.csv), and of tables that fit into
the cache on one (calibration/cached.csv). Nothing is fitted to ids with skew: those of lookups alone on one GPU
(calibration/skewed.csv), and of traced steps on two (calibration/timeline.csv, cut.csv).
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm_overlap.config import parse_multi_hot
from dlrm_overlap.embedding.balance import TableLoad, balance
from dlrm_overlap.simulate.calibrate import read_rows
from dlrm_overlap.simulate.config import GpuConfig, LookupConfig
from dlrm_overlap.simulate.workload import expected_rows

FOLDER = Path(__file__).parent
CACHE_BYTES = 25e6  # half of an H200's L2: either half keeps what the multiprocessors beside it have read
_CAPACITY_BYTES = 80 << 30  # of a rank's tables, as in `simulate.measured`
_LEAST_MS = 0.2  # of a lookup that tells a rate: what a launch takes is no part of it
_SHOWN_MS = 0.07  # of a lookup alone that is shown


class Reads(NamedTuple):
    """The rows that a rank reads of a table."""

    ids: float
    misses: float
    """ids whose row is not in the cache"""
    row_bytes: float


class Lookup(NamedTuple):
    """A measured lookup of one rank."""

    name: str
    ms: float
    tables: Sequence[Reads]
    other_bytes: float
    """ids, offsets and pooled embeddings"""
    bags: float


def misses(rows: int, alpha: float, ids: float, cached_rows: float) -> float:
    """Return how many of `ids` independent ids name a row that none of the last ids name that fill the cache.

    So many ids as name `cached_rows` rows fill it. Behind these an id is missed as often as one more id names a row
    that so many have not named (Denning & Schwartz 1972).

    Example: 1000 rows, all alike, 100 of which stay: 105 ids name 100, and 9 of 10 ids behind these are missed.
    """
    if expected_rows(rows, alpha, ids) <= cached_rows:
        return expected_rows(rows, alpha, ids)
    filled, more = cached_rows, ids
    while more - filled > 1e-6 * ids:
        between = (filled + more) / 2
        filled, more = (between, more) if expected_rows(rows, alpha, between) < cached_rows else (filled, between)
    step = max(1.0, 1e-3 * filled)
    new = (expected_rows(rows, alpha, filled + step) - expected_rows(rows, alpha, filled)) / step
    return cached_rows + (ids - filled) * new


def _reads(rows: int, alpha: float, ids: float, row_bytes: float) -> Reads:
    return Reads(ids, misses(rows, alpha, ids, CACHE_BYTES / row_bytes), row_bytes)


def lookups_alone(path: Path, least_ms: float) -> Iterator[Lookup]:
    """Yield the lookups of a file of `bench sweep` that take so long, and that the links do not hold up."""
    for row in read_rows(path):
        ranks, ms = int(row["world_size"]), float(row["gpu_ms"])
        link_ms = float(row["link_bytes"]) / float(row["link_gb_per_s"]) / 1e6 if ranks > 1 else 0.0
        if row["contender"] != "pgas" or row["output_dtype"] != "fp32" or ms < max(least_ms, 1.5 * link_ms):
            continue
        tables, batch, dim = int(row["tables"]) // ranks, int(row["global_batch"]), int(row["dim"])
        table = _reads(int(row["rows"]), float(row["zipf_alpha"]), batch * float(row["pooling_factor"]), 4.0 * dim)
        other = float(row["hbm_bytes"]) - tables * table.ids * table.row_bytes
        name = f"alone, {tables} tables of {row['multi_hot']} ids, dim {dim}"
        yield Lookup(name, ms, [table] * tables, other, tables * batch)


def traced_lookups() -> Iterator[Lookup]:
    """Yield the lookups of the traced steps on two GPUs, each of a rank with the tables of its plan."""
    rows = read_rows(FOLDER / "calibration" / "timeline.csv") + read_rows(FOLDER / "calibration" / "cut.csv")
    for row in rows:
        if row["contender"] == "pgas_graph":
            yield _traced_lookup(row)


def _traced_lookup(row: Mapping[str, str]) -> Lookup:
    batch, dim, rank, ranks = (int(row[name]) for name in ("global_batch", "dim", "rank", "world_size"))
    pooling = [float(np.mean(parse_multi_hot(each))) for each in ast.literal_eval(row["multi_hot"])]
    counts = ast.literal_eval(row["rows"])
    loads = [TableLoad(hot, dim, 4 * dim, 8 * dim * count) for hot, count in zip(pooling, counts, strict=True)]
    placed = balance(loads, ranks, _CAPACITY_BYTES, cut=True)
    assert placed is not None, "the tables fit"
    tables = []
    for count, hot, owners in zip(counts, pooling, placed.ranks, strict=True):
        if rank in owners:
            tables.append(_reads(count, float(row["zipf_alpha"]), batch * hot, 4.0 * dim / len(owners)))
    bags = batch * len(tables)
    other = 4.0 * (sum(each.ids for each in tables) + bags) + batch / ranks * len(counts) * dim * 2.0
    name = f"step {row['arch']}, {batch // ranks} samples, {max(pooling):g} of {sum(pooling):g} ids, rank {rank}"
    return Lookup(name, float(row["lookup_kernels_ms"]), tables, other, bags)


def time_ms(lookup: Lookup, rates: LookupConfig, cached_gb_per_s: float | None) -> float:
    """Return the time of a lookup; with no rate of a cache, all its rows come from memory.

    Tables are read one after the other. Each takes as long as the memory needs for what is missed, or as the cache
    needs for all rows, whichever is longer.
    """
    seconds = lookup.bags * rates.bag_ns / 1e9 + lookup.other_bytes / rates.gb_per_s / 1e9
    for table in lookup.tables:
        if cached_gb_per_s is None:
            seconds += table.ids * table.row_bytes / rates.gb_per_s / 1e9
        else:
            memory_s = table.misses * table.row_bytes / rates.gb_per_s / 1e9
            seconds += max(memory_s, table.ids * table.row_bytes / cached_gb_per_s / 1e9)
    return seconds * 1e3


def fit(lookups: Sequence[Lookup], bag_ns: float) -> tuple[LookupConfig, float]:
    """Return the memory's and the cache's rates, in steps of 1%, with the least squares of relative errors."""
    best = np.inf, LookupConfig(), 0.0
    for memory in np.geomspace(3500, 4800, 32):
        rates = LookupConfig(round(float(memory)), bag_ns)
        for cache in np.geomspace(4800, 12000, 92):
            errors = [time_ms(each, rates, float(cache)) / each.ms - 1 for each in lookups]
            best = min(best, (float(np.square(errors).sum()), rates, round(float(cache))), key=lambda found: found[0])
    return best[1], best[2]


def tables() -> tuple[str, list[str]]:
    """Return what uniform ids tell, and the lines of the page's table: all rows from memory, and with a cache."""
    known, measured = GpuConfig().pgas, FOLDER / "calibration"
    uniform = [
        each for path in (FOLDER / "sweep.csv", measured / "cached.csv") for each in lookups_alone(path, _LEAST_MS)
    ]
    rates, cached = fit(uniform, known.bag_ns)
    errors = sorted(abs(time_ms(each, rates, cached) / each.ms - 1) for each in uniform)
    told = f"{rates.gb_per_s:g} GB/s of the memory and {cached:g} of the cache, {len(uniform)} lookups"
    told += f" within {100 * errors[-1]:.0f}%, {sum(error <= 0.1 for error in errors)} of them within 10%"
    lines = []
    for lookup in (*lookups_alone(measured / "skewed.csv", _SHOWN_MS), *traced_lookups()):
        plain, with_cache = time_ms(lookup, known, None), time_ms(lookup, rates, cached)
        cells = [f"{ms:.3f} | {100 * ms / lookup.ms - 100:+.0f}%" for ms in (plain, with_cache)]
        lines.append(f"| {lookup.name} | {lookup.ms:.3f} | {' | '.join(cells)} |")
    return told, lines


if __name__ == "__main__":
    told, lines = tables()
    print("\n".join([told, *lines]))
