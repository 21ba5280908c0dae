"""Runs of several contenders and seeds, whose rows are in one file."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dlrm_overlap.bench.harness.workload import collect_garbage, config_digest, describe, describe_work, with_keys
from dlrm_overlap.bench.rows import print_table, rows_to_continue
from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.train.ranks import Ranks, check_needs_no_checkpoint
from dlrm_overlap.train.trainer import Trainer

T = TypeVar("T")
Row = dict[str, Any]


def seeded_config(config: Config, keys: Mapping[str, Any], name: str, seed: int, folder: Path) -> Config:
    """Return the configuration of a contender's run with `seed`, which saves nothing; its results are in `folder`."""
    once: dict[str, Any] = {
        "checkpoint.resume": "never",
        "checkpoint.every": 0,
        "checkpoint.last": False,
        "checkpoint.delta_every": 0,
        "train.target_auroc": 0.0,
    }
    log = {"log.dir": str(folder), "log.name": f"{name}_{seed}", "log.overwrite": True}
    return with_keys(config, {**keys, "train.seed": seed, **once, **log})


def fit(trainer: Trainer) -> str:
    """Train to the end, and return why training ended early; empty if no loss was NaN or infinite. A collective."""
    try:
        trainer.fit()
    except NotFiniteError as error:  # on all ranks at the same step
        return str(error)
    return ""


def finished_runs(kind: str, ranks: Ranks, **work: Any) -> dict[tuple[str, int], bool]:
    """Return the contender and the seed of each run whose rows are in `--output`, and whether its loss stayed finite.

    Raises:
        InputError: if the runs need checkpoints, if the file exists and `--resume` is false, or if its rows differ from
            this configuration or from `work`, which maps columns to values.
    """
    output = Path(ranks.values.output)
    check_needs_no_checkpoint(ranks.config, f"bench {kind}")
    if not ranks.values.resume and output.exists():
        raise InputError(f"--output: {output} exists; give another file, or add --resume true to continue there")
    work |= describe_work(ranks.config, ranks.world.world_size)
    if ranks.config.train.steps:  # else the samples decide
        work["steps"] = ranks.config.train.steps
    work["config"] = config_digest(ranks.config)
    found: dict[tuple[str, int], bool] = {}
    for row in rows_to_continue(output, work):
        run = row["contender"], int(row["seed"])
        found[run] = found.get(run, True) and math.isfinite(float(row["loss"]))
    return found


def train_once(ranks: Ranks, config: Config, train: Callable[[Trainer], T]) -> tuple[Row, T]:
    """Open a trainer, and free its memory after `train`; a collective.

    Returns what the configuration is, with its number of steps, and what `train` returned.
    """
    trainer = ranks.trainer(config)
    found = train(trainer)
    about = describe(trainer.config, ranks.world.world_size) | {"steps": trainer.steps}
    about["config"] = config_digest(ranks.config)
    trainer.close()
    del trainer
    collect_garbage(ranks.device)
    return about, found


def show(ranks: Ranks, lines: Callable[[], Sequence[Row]], columns: Sequence[str], output: Path) -> None:
    """Print the table at the end of the command, on rank 0."""
    if ranks.world.rank == 0:
        print_table(lines(), columns)
        print(f"rows in {output}")


def spread(name: str, numbers: Sequence[float]) -> Row:
    """Return mean and standard deviation of a sample: None if it is too small, NaN if a number is not finite."""
    if not all(map(math.isfinite, numbers)):
        return {name: math.nan, f"{name}_std": math.nan}
    mean = statistics.mean(numbers) if numbers else None
    return {name: mean, f"{name}_std": statistics.stdev(numbers) if len(numbers) > 1 else None}


def text_of_keys(keys: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items())
