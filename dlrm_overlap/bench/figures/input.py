"""`bench input`: times the training step fed by the loader, and the same step on one batch in memory.

`loaded_to_cached` is the ratio of the means, since medians do not show a stall in a few steps. `workers` is 0 where
synthetic samples are made on the GPU.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.harness.timing import ROUNDS, take_turns, time_steps
from dlrm_overlap.bench.harness.training_runs import AHEAD
from dlrm_overlap.bench.harness.workload import describe
from dlrm_overlap.bench.rows import report
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_WARMUP_STEPS = 10
_TIMES = ("mean_ms", "p10_ms", "median_ms", "p90_ms")
_SHOWN = (
    "workers", "cached_median_ms", "loaded_median_ms", "cached_mean_ms", "loaded_mean_ms", "loaded_to_cached",
    "input_wait_ms", "samples_per_s",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    # Time steps on the cached batch and steps fed by the loader, in turns.
    trainer = ranks.trainer()
    with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
        batches = iter(loader)
        cached = next(batches).clone()  # the loader reuses its memory
        if trainer.device.type == "cuda":
            cached = cached.pin_memory()
        before_s = loader.wait_s
        warmup = _WARMUP_STEPS + loader.read_ahead  # so that no timed batch was read during cached steps
        turns = [
            partial(take_turn, trainer, itertools.repeat(cached), _WARMUP_STEPS),
            partial(take_turn, trainer, batches, warmup),
        ]
        of_cached, loaded = take_turns(turns, ranks.values.steps, trainer.device)
        wait_ms = (loader.wait_s - before_s) * 1e3 / (loaded.steps + ROUNDS * (warmup + AHEAD))
    trainer.close()
    row: dict[str, Any] = {
        "kind": kind,
        **describe(replace(trainer.config, embedding=trainer.embedding), ranks.world.world_size),
        "data": trainer.config.data.kind,
        "workers": 0 if trainer.train_data.on_gpu else trainer.config.data.workers,
        "ids_per_sample": sum(trainer.train_data.pooling),
        "steps": loaded.steps,
        **{f"cached_{name}": getattr(of_cached, name) for name in _TIMES},
        **{f"loaded_{name}": getattr(loaded, name) for name in _TIMES},
        "loaded_to_cached": loaded.mean_ms / of_cached.mean_ms,
        "input_wait_ms": wait_ms,
        "samples_per_s": trainer.global_batch * 1e3 / loaded.median_ms,
    }
    if ranks.world.rank == 0:
        report([row], [], Path(ranks.values.output), _SHOWN)
    return 0


def take_turn(trainer: Trainer, batches: Iterator[Batch], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the result of `time_steps`, in which each step prefetches a batch."""
    segment = itertools.islice(batches, warmup + steps + AHEAD)
    trainer.pipeline.reset()
    for _ in range(warmup):
        trainer.step(segment)
    found = time_steps(partial(trainer.step, segment), steps, trainer.device)
    for _ in range(AHEAD):
        trainer.step(segment)
    return found
