"""`bench input`: does the input keep up with training?

Contenders: the training step fed by the loader, and the same step on one batch that stays in memory. Of packed samples
the loader is timed alone, too: once when the files have left the page cache, so that it reads the disk, and once when
they are there. The file has one row for a run; its columns are this figure's own.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import ROUNDS, greatest, take_turns, time_steps
from dlrm_overlap.bench.rows import report
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_WARMUP_STEPS = 10
_TIMES = ("mean_ms", "p10_ms", "median_ms", "p90_ms")
_READ = ("bytes_per_sample", "disk_gb_per_s", "disk_feeds_gpus", "cache_gb_per_s", "cache_feeds_gpus")
_SHOWN = ("cached_median_ms", "loaded_median_ms", "loaded_to_cached", "input_wait_ms", "samples_per_s", *_READ)


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code 0."""
    trainer, steps = ranks.trainer(), ranks.values.steps
    row: dict[str, Any] = {"kind": kind} | _time_both(trainer, steps)
    row |= dict.fromkeys(_READ) | _time_reading(trainer, steps, row["cached_median_ms"])
    trainer.close()
    if ranks.world.rank == 0:
        report([row], [], Path(ranks.values.output), _SHOWN)
    return 0


def _time_both(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Time at least `steps` training steps of each kind and return the row. All ranks call this."""
    with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
        batches = iter(loader)
        cached = next(batches).clone()  # its own memory: the loader's is lent
        if trainer.device.type == "cuda":
            cached = cached.pin_memory()
        before_s = loader.wait_s
        warmup = _WARMUP_STEPS + loader.read_ahead  # no later batch was read beside cached steps
        turns = [
            partial(_take_turn, trainer, itertools.repeat(cached), _WARMUP_STEPS),
            partial(_take_turn, trainer, batches, warmup),
        ]
        of_cached, loaded = take_turns(turns, steps, trainer.device)
        wait_ms = (loader.wait_s - before_s) * 1e3 / (loaded.steps + ROUNDS * warmup)
    config = trainer.config
    return {
        "backend": config.embedding.backend,
        "data": config.data.kind,
        "workers": config.data.workers,
        "world_size": trainer.world.world_size,
        "samples_per_rank": trainer.samples_per_rank,
        "arch": config.model.arch,
        "precision": config.train.precision,
        "graph_dense": config.train.graph_dense,
        "ids_per_sample": sum(trainer.train_data.pooling),
        "steps": loaded.steps,
        **{f"cached_{name}": getattr(of_cached, name) for name in _TIMES},
        **{f"loaded_{name}": getattr(loaded, name) for name in _TIMES},
        "loaded_to_cached": loaded.mean_ms / of_cached.mean_ms,
        "input_wait_ms": wait_ms,
        "samples_per_s": trainer.global_batch * 1e3 / loaded.median_ms,
    }


def _take_turn(trainer: Trainer, batches: Iterator[Batch], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the times of `steps` steps in ms, after `warmup` steps that also refill the pipeline."""
    segment = itertools.islice(batches, steps + warmup)
    trainer.pipeline.reset()
    for _ in range(warmup):
        trainer.step(segment)
    return time_steps(partial(trainer.step, segment), steps, trainer.device)


def _time_reading(trainer: Trainer, steps: int, step_ms: float) -> dict[str, Any]:
    """Return the columns of the loader alone, of which there are none unless samples are packed. All ranks call this.

    A rate is that of all ranks, which feeds as many GPUs as take so many samples by steps of `step_ms`.
    """
    data, path = trainer.train_data, trainer.config.data.path
    if data.packed is None or path is None:
        return {}
    found: dict[str, Any] = {"bytes_per_sample": data.packed.record_bytes}
    for source in ("disk", "cache"):
        dist.barrier()
        if source == "disk" and trainer.world.local_rank == 0:
            for file in Path(path).iterdir():
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
            for _ in itertools.islice(loader, loader.read_ahead + 1):  # read while the processes were started
                pass
            began = time.perf_counter()
            for _ in itertools.islice(loader, steps):
                pass
            (seconds,) = greatest([time.perf_counter() - began], trainer.device)
        samples_per_s = steps * trainer.global_batch / seconds
        found[f"{source}_gb_per_s"] = samples_per_s * found["bytes_per_sample"] / 1e9
        found[f"{source}_feeds_gpus"] = samples_per_s * step_ms / 1e3 / trainer.samples_per_rank
    return found
