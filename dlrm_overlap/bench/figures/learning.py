"""`bench learning`: trains one configuration with several contenders and seeds, and compares what they learn.

A row is an evaluation: AUROC and NE of the held-out samples, and the training samples and seconds before it. Seconds do
not include evaluations. A seed decides the initial weights and how samples from files are shuffled.

The table at the end has, for each contender, means over the seeds and standard deviations. Differences are to the first
contender with the same seed. Samples and seconds to the target are those at the first evaluation whose AUROC reaches
it, as in MLPerf's rules; their spread is the coefficient of variation.

A run ends early if a loss is not finite, with a row of that step, which is NaN if it was a training loss. The other
runs go on, and the command returns `DISAGREEMENT`, also when a later call continues the file.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.harness.seeded_runs import (
    Row,
    finished_runs,
    fit,
    seeded_config,
    show,
    spread,
    text_of_keys,
    train_once,
)
from dlrm_overlap.bench.learning_contenders import LEARNING_CONTENDERS
from dlrm_overlap.bench.rows import append_rows, folder_of_runs, read_rows
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.ranks import Ranks, check_start
from dlrm_overlap.train.trainer import Trainer

_METRICS = ("auroc", "ne", "loss")
_AT_TARGET = ("samples", "seconds")
_SHOWN = (
    "contender", "seeds", "auroc", "auroc_std", "ne", "ne_std", "ne_difference", "ne_difference_std",
    "samples_to_target", "samples_cv", "seconds_to_target", "seconds_cv", "reached"
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    values, output = ranks.values, Path(ranks.values.output)
    if not ranks.config.train.eval_every:
        raise InputError(
            "train.eval_every: 0, but a curve is made of evaluations; set the number of steps between them"
        )
    done = finished_runs(kind, ranks)
    configs = {
        (name, seed): learning_config(ranks.config, name, seed, folder_of_runs(output))
        for seed in values.seeds
        for name in values.contenders
    }
    for config in configs.values():
        check_start(config, ranks.device)
    diverged = any(run in configs and not finite for run, finite in done.items())
    for (name, seed), config in configs.items():
        if (name, seed) in done:
            continue
        described, (points, fault) = train_once(ranks, config, train_and_evaluate)
        diverged |= bool(fault)
        if ranks.world.rank == 0:
            keys = text_of_keys(LEARNING_CONTENDERS[name])
            about = {"kind": kind, "contender": name, "keys": keys, "seed": seed} | described
            append_rows(output, [about | point for point in points])
            print(f"{name}, seed {seed}: AUROC {points[-1]['auroc']}, NE {points[-1]['ne']}", flush=True)
            if fault:
                print(f"dlrm-overlap: {name}, seed {seed}: {fault}", file=sys.stderr)
    show(ranks, lambda: summarise(read_rows(output), values.contenders, values.target_auroc), _SHOWN, output)
    return DISAGREEMENT if diverged else 0


def learning_config(config: Config, name: str, seed: int, folder: Path) -> Config:
    """Return the configuration of a contender's run with `seed`, which saves nothing; its results are in `folder`."""
    keys, tables = dict(LEARNING_CONTENDERS[name]), config.data.tables
    if "data.tables.ids" in keys and config.embedding.id_tables.rows is None and tables.rows is not None:
        keys["embedding.id_tables.rows"] = [2 * rows for rows in tables.synthetic_rows]  # so that every id has a row
    if config.data.kind != "synthetic":  # whose seed also decides the labels
        keys["data.seed"] = seed
    return seeded_config(config, keys, name, seed, folder)


def train_and_evaluate(trainer: Trainer) -> tuple[list[Row], str]:
    """Train to the end, and return a point for each evaluation, see the module; a collective.

    Also returns why training ended early; empty if it did not.
    """
    evaluate, points, evaluations_s = trainer.evaluate, list[Row](), 0.0
    began = time.perf_counter()

    def add_point(values: Mapping[str, float], now: float) -> None:
        step = trainer.progress.step
        at = {"step": step, "samples": step * trainer.global_batch, "seconds": now - began - evaluations_s}
        points.append(at | {name: f"{values[name]:.6f}" for name in _METRICS})

    def evaluate_and_add(ends: Callable[[], bool]) -> dict[str, float]:
        nonlocal evaluations_s
        before = time.perf_counter()
        values = evaluate(ends)
        add_point(values, before)
        evaluations_s += time.perf_counter() - before
        return values

    trainer.evaluate = evaluate_and_add  # type: ignore[method-assign]
    fault = fit(trainer)
    if fault and (not points or points[-1]["step"] != trainer.progress.step):  # else this evaluation found it
        add_point(dict.fromkeys(_METRICS, math.nan), time.perf_counter())
    return points, fault


def summarise(rows: Sequence[Mapping[str, Any]], contenders: Sequence[str], target: float | None) -> list[Row]:
    """Return a row for each contender, see the module; the first one is the reference."""
    curves: dict[str, dict[int, list[Mapping[str, Any]]]] = {name: {} for name in contenders}
    for row in rows:
        if row["contender"] in curves:
            curves[row["contender"]].setdefault(int(row["seed"]), []).append(row)
    first = curves[contenders[0]]
    found = []
    for name, by_seed in curves.items():
        ends = {seed: curve[-1] for seed, curve in by_seed.items()}
        line: Row = {"contender": name, "seeds": len(by_seed)}
        for metric in ("auroc", "ne"):
            line |= spread(metric, [float(end[metric]) for end in ends.values()])
        if name != contenders[0]:
            line |= spread(
                "ne_difference", [float(end["ne"]) - float(first[s][-1]["ne"]) for s, end in ends.items() if s in first]
            )
        if target is not None:
            reached = [next((p for p in curve if float(p["auroc"]) >= target), None) for curve in by_seed.values()]
            points = [point for point in reached if point is not None]
            line["reached"] = f"{len(points)} of {len(reached)}"
            for what in _AT_TARGET:
                found_at = spread(what, [float(point[what]) for point in points])
                mean, std = found_at[what], found_at[f"{what}_std"]
                line |= {f"{what}_to_target": mean, f"{what}_cv": std / mean if mean and std is not None else None}
        found.append(line)
    return found
