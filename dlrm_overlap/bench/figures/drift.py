"""`bench drift`: trains one model on one drifting stream of ids, under several ways to give ids their rows.

The stream is synthetic, and data.tables.drift sets how fast new ids replace old ones. All contenders of a seed get the
same samples, and all but `unlimited` and `modulus_twice` the same number of rows. A seed decides the stream, the
teacher that labels it, and the initial weights.

A row of the results is a day: `train.steps` are divided into `--days` equal windows. Its metrics are progressive: a
step's predictions are made by its forward, so before the step trains on these samples, and no sample comes twice. The
normalized entropy (NE) of a day is the mean log loss of its predictions, divided by the entropy of the day's mean
label (He et al., 2014); a model that knows the mean label alone has 1. `mean_ne` is the mean NE of the days so far.
The metrics are those of the log lines, which are accumulated on the device (`observe.metrics.RunningMetrics`).

`distinct_ids` are counted in the stream itself, day by day.

A run ends early if a loss is not finite; its last row, of that day, is then NaN. The other runs go on, and the command
returns `DISAGREEMENT`, also when a later call continues the file.
"""

import itertools
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_overlap.bench.drift_contenders import DRIFT_CONTENDERS, Design
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
from dlrm_overlap.bench.harness.workload import with_keys
from dlrm_overlap.bench.rows import append_rows, folder_of_runs, read_rows
from dlrm_overlap.config import Config, IdTablesConfig, InputError
from dlrm_overlap.data.hashed import hashed_rows
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.id_tables.rules import rows_of_tables
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.observe.result_files import read_records
from dlrm_overlap.train.assembly import check_torchrec_maps
from dlrm_overlap.train.ranks import Ranks, check_start
from dlrm_overlap.train.trainer import Trainer

_READ = 1 << 17  # samples counted at a time
_SHOWN = (
    "contender", "seeds", "table_rows", "distinct_ids", "mean_ne", "mean_ne_std", "difference", "difference_std",
    "last_ne", "mean_auroc", "rows_used", "no_row"
)  # fmt: skip


@dataclass(frozen=True)
class Day:
    """The ids from the stream's beginning to the end of a day."""

    distinct: list[int]
    """number of distinct ids of each table of any id"""
    used: dict[int, int]
    """factor -> rows that these ids have in tables of hashed ids with `factor` times the configured rows"""


@dataclass(frozen=True)
class Stream:
    """The samples that all contenders of a seed train on."""

    config: Config
    world_size: int
    days: int
    steps: int
    """of a day"""
    of_any: list[bool]
    """of each table, whether it takes any id"""
    rows: list[int]
    """of the tables of any id, rounded up as training does"""

    @classmethod
    def of(cls, config: Config, world_size: int, days: int) -> "Stream":
        """Raises an InputError if the configuration has no such stream."""
        tables, steps = config.data.tables, config.train.steps
        if config.data.kind != "synthetic" or not tables.drift or tables.hashed_rows is not None:
            raise InputError(
                f"bench drift: data.kind {config.data.kind}, data.tables.ids {tables.ids}, data.tables.drift "
                f"{tables.drift}; it needs synthetic tables with ids any that drift: start from --config bench/drift"
            )
        if not steps or steps % days:
            raise InputError(f"train.steps: {steps}, which is not a multiple of --days {days}; set one that is")
        of_any = [ids == "any" for ids in _per_table(tables.ids, tables.number())]
        rows = _rounded(config.embedding.id_tables, of_any.count(True), world_size)
        return cls(config, world_size, days, steps // days, of_any, rows)

    @property
    def samples(self) -> int:
        """Samples of a day."""
        return self.steps * self.config.train.samples_per_rank(self.world_size) * self.world_size

    def about(self) -> Row:
        tables = self.config.data.tables
        rows = _per_table(tables.rows, len(self.of_any))
        return {
            "days": self.days,
            "half_life_days": tables.drift / self.samples,
            "ids_in_use": sum(count or 0 for count, of_any in zip(rows, self.of_any, strict=True) if of_any),
        }

    def design(self, design: Design, distinct: Sequence[int]) -> tuple[dict[str, Any], int]:
        """Return the keys of a design, and the total number of rows of its tables that take any id.

        `distinct` has the number of distinct ids of each of them in the whole stream.
        """
        if design.rows == "unlimited":
            wanted = [2 * count for count in distinct]
            rows = _rounded(IdTablesConfig(rows=wanted), len(wanted), self.world_size)
        else:
            rows = [design.rows * count for count in self.rows]
        if not design.hashed:
            return {**design.keys, "embedding.id_tables.rows": rows}, sum(rows)
        of_table = iter(rows)
        keys = {
            "data.tables.ids": ["hashed" if of_any else "rows" for of_any in self.of_any],
            "data.tables.hashed_rows": [next(of_table) if of_any else 1 for of_any in self.of_any],
            "embedding.id_tables": IdTablesConfig(),
        }
        return {**design.keys, **keys}, sum(rows)

    def count(self, device: torch.device, factors: Collection[int] = ()) -> Iterator[Day]:
        """Read the samples, and yield a `Day` at the end of each day."""
        data, _ = open_datasets(self.config.data, device)
        known = [torch.empty(0, dtype=torch.int64, device=device) for _ in self.rows]
        for first in range(0, self.days * self.samples, self.samples):
            for begin in range(first, first + self.samples, _READ):
                batch = data.read(begin, min(_READ, first + self.samples - begin))
                tables = itertools.compress(batch.sparse.to_dict().values(), self.of_any)
                known = [torch.cat([ids, table.values()]).unique() for ids, table in zip(known, tables, strict=True)]
            used = dict.fromkeys(factors, 0)
            for factor in factors:
                for ids, rows in zip(known, self.rows, strict=True):
                    used[factor] += int(np.bincount(hashed_rows(ids.cpu().numpy(), factor * rows)).astype(bool).sum())
            yield Day([len(ids) for ids in known], used)


def run(kind: str, ranks: Ranks) -> int:
    values, output = ranks.values, Path(ranks.values.output)
    done = finished_runs(kind, ranks, days=values.days)
    designs = {name: DRIFT_CONTENDERS[name] for name in values.contenders}
    streams = {
        seed: Stream.of(with_keys(ranks.config, {"data.seed": seed}), ranks.world.world_size, values.days)
        for seed in values.seeds
    }
    if "mpzch" in designs:
        check_torchrec_maps(streams[values.seeds[0]].rows, False, ranks.device)
    diverged = any(name in designs and seed in streams and not finite for (name, seed), finite in done.items())
    for seed, stream in streams.items():
        missing = {name: design for name, design in designs.items() if (name, seed) not in done}
        factors = {design.rows for design in missing.values() if design.hashed and design.rows != "unlimited"}
        days = list(stream.count(ranks.device, factors)) if missing else []
        for name, design in missing.items():
            keys, table_rows = stream.design(design, days[-1].distinct)
            windows = {"log.every": stream.steps, "train.eval_every": 0}
            config = seeded_config(stream.config, keys | windows, name, seed, folder_of_runs(output))
            about = {"kind": kind, "contender": name, "keys": text_of_keys(design.keys), "seed": seed}
            check_start(config, ranks.device)
            described, (metrics, fault) = train_once(ranks, config, _fit)
            diverged |= bool(fault)
            if ranks.world.rank:
                continue
            records = [each for each in read_records(metrics) if "train/ne" in each]
            rows = rows_of_days(records, days, design, table_rows, stream.samples)
            about |= described | stream.about() | {"table_rows": table_rows}
            append_rows(output, [about | row for row in rows])
            print(f"{name}, seed {seed}: mean NE {rows[-1]['mean_ne']}, last day {rows[-1]['ne']}", flush=True)
            if fault:
                print(f"dlrm-overlap: {name}, seed {seed}: {fault}", file=sys.stderr)
            if design.rows == "unlimited" and any(row["no_row"] for row in rows):
                print(f"dlrm-overlap: {name}, seed {seed}: some ids found no row", file=sys.stderr)
    show(ranks, lambda: summarise(read_rows(output), values.contenders), _SHOWN, output)
    return DISAGREEMENT if diverged else 0


def _per_table(value: Any, number: int) -> list[Any]:
    return value if isinstance(value, list) else [value] * number


def _rounded(config: IdTablesConfig, tables: int, world_size: int) -> list[int]:
    return rows_of_tables([None] * tables, config, world_size)


def _fit(trainer: Trainer) -> tuple[Path, str]:
    """Train to the end, and return the file of metrics, which is complete once the trainer is closed.

    Also returns why training ended early; empty if it did not.
    """
    fault = fit(trainer)
    return trainer.folder / "metrics.jsonl", fault


def rows_of_days(
    records: Sequence[Mapping[str, Any]], days: Sequence[Day], design: Design, table_rows: int, samples: int
) -> list[Row]:
    """Return a row for each day that was trained, of `samples` samples, see the module.

    `records` are the training lines of a run's metrics.
    """
    rows: list[Row] = []
    sums = {"ne": 0.0, "auroc": 0.0}
    for number, (record, day) in enumerate(zip(records, days[: len(records)], strict=True), 1):
        row: Row = {"day": number, "samples": number * samples, "distinct_ids": sum(day.distinct)}
        found = {metric: _number(record[f"train/{metric}"]) for metric in ("loss", *sums)}
        row["loss"] = f"{found['loss']:.5f}"
        for metric in sums:
            sums[metric] += found[metric]
            row |= {metric: f"{found[metric]:.5f}", f"mean_{metric}": f"{sums[metric] / number:.5f}"}
        has_map = "train/ids_inserted" in record
        no_row = record["train/ids_not_admitted"] + record["train/ids_no_room"] if has_map else None
        used = record["train/ids_rows_used"] if has_map else None
        if design.hashed and design.rows != "unlimited":
            no_row, used = 0.0, day.used[design.rows] / table_rows
        row |= {"rows_used": used, "no_row": no_row}
        for name in ("ids_inserted", "ids_evicted"):
            row[name] = int(record[f"train/{name}"]) if has_map else None
        rows.append(row)
    return rows


def _number(logged: float | None) -> float:
    return math.nan if logged is None else logged


def summarise(rows: Sequence[Mapping[str, Any]], contenders: Sequence[str]) -> list[Row]:
    """Return a row for each contender: means over seeds and standard deviations of the whole run and the last day.

    `difference` is `mean_ne` minus the first contender's with the same seed.
    """
    last: dict[str, dict[int, Mapping[str, Any]]] = {name: {} for name in contenders}
    for row in rows:
        if row["contender"] in last:
            last[row["contender"]][int(row["seed"])] = row
    first = last[contenders[0]]
    found = []
    for name, by_seed in last.items():
        line: Row = {"contender": name, "seeds": len(by_seed)}
        for metric in ("mean_ne", "mean_auroc"):
            line |= spread(metric, [float(row[metric]) for row in by_seed.values()])
        line |= spread("last_ne", [float(row["ne"]) for row in by_seed.values()])
        if name != contenders[0]:
            line |= spread(
                "difference",
                [
                    float(row["mean_ne"]) - float(first[seed]["mean_ne"])
                    for seed, row in by_seed.items()
                    if seed in first
                ],
            )
        for key in ("table_rows", "distinct_ids", "rows_used", "no_row"):
            mean = spread(key, [float(row[key]) for row in by_seed.values() if row[key] != ""])[key]
            line[key] = mean and (round(mean) if key in ("table_rows", "distinct_ids") else mean)
        found.append(line)
    return found
