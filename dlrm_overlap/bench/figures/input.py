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
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import Timing, greatest
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import InputRequest
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.observe.metrics import StepTimer
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_ROUNDS = 4  # cached and loaded steps take turns, so that a drift of the machine slows both
_WARMUP_STEPS = 10
_TIMES = ("mean_ms", "p10_ms", "median_ms", "p90_ms")
_SHOWN = ("cached_median_ms", "loaded_median_ms", "loaded_to_cached", "input_wait_ms", "samples_per_s")
_READ = ("bytes_per_sample", "disk_gb_per_s", "disk_feeds_gpus", "cache_gb_per_s", "cache_feeds_gpus")


def run(request: InputRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code 0."""
    trainer = ranks.trainer()
    row = _measure(trainer, request.steps)
    reads = _measure_reading(trainer, request.steps, row["cached_median_ms"])
    trainer.close()
    if ranks.world.rank == 0:
        report(
            [{"kind": request.kind} | row | reads],
            [],
            request.output,
            _SHOWN + _READ if reads["bytes_per_sample"] else _SHOWN,
        )
    return 0


def _measure_reading(trainer: Trainer, steps: int, step_ms: float) -> dict[str, Any]:
    """Return the columns of the loader alone, which are empty unless samples are packed. All ranks call this.

    A rate is that of all ranks, which feeds as many GPUs as take so many samples by steps of `step_ms`.
    """
    found: dict[str, Any] = dict.fromkeys(_READ)
    data, path = trainer.train_data, trainer.config.data.path
    if data.packed is None or path is None:
        return found
    found["bytes_per_sample"] = data.packed[0].record_bytes
    for source in ("disk", "cache"):
        dist.barrier()
        if source == "disk" and trainer.world.local_rank == 0:
            _forget(Path(path))
        dist.barrier()
        seconds = greatest([_read_s(trainer, steps)], trainer.device)[0]
        samples_per_s = steps * trainer.global_batch / seconds
        found[f"{source}_gb_per_s"] = samples_per_s * found["bytes_per_sample"] / 1e9
        found[f"{source}_feeds_gpus"] = samples_per_s * step_ms / 1e3 / trainer.samples_per_rank
    return found


def _read_s(trainer: Trainer, steps: int) -> float:
    """Return the time in seconds in which the loader alone gives the batches of `steps` steps."""
    with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
        for _ in itertools.islice(loader, loader.read_ahead + 1):  # read while the processes were started
            pass
        start = time.perf_counter()
        for _ in itertools.islice(loader, steps):
            pass
        return time.perf_counter() - start


def _forget(folder: Path) -> None:
    """Drop the files of days from the page cache, so that they are read from the disk again."""
    for file in folder.rglob("day_*"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _measure(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Time `steps` training steps of each kind and return the row. All ranks call this."""
    per_round = max(1, steps // _ROUNDS)
    cached_ms: list[float] = []
    loaded_ms: list[float] = []
    waited_s = 0.0
    with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
        batches = iter(loader)
        loader_warmup = _WARMUP_STEPS + loader.read_ahead  # after these, no batch was read while the cached steps ran
        cached = next(batches).clone()  # its own memory: the loader's is lent
        if trainer.device.type == "cuda":
            cached = cached.pin_memory()
        for _ in range(_ROUNDS):
            cached_ms += _time_steps(trainer, itertools.repeat(cached), per_round, _WARMUP_STEPS)
            waited_s -= loader.wait_s
            loaded_ms += _time_steps(trainer, batches, per_round, loader_warmup)
            waited_s += loader.wait_s
    times = {"cached": cached_ms, "loaded": loaded_ms}
    found = {name: Timing.of(ms, [0.0], trainer.device) for name, ms in times.items()}
    config = trainer.config
    return {
        "backend": config.embedding.backend,
        "data": config.data.kind,
        "distinct_steps": config.data.distinct_steps,
        "workers": config.data.workers,
        "world_size": trainer.world.world_size,
        "samples_per_rank": trainer.samples_per_rank,
        "arch": config.model.arch,
        "precision": config.train.precision,
        "graph_dense": config.train.graph_dense,
        "ids_per_sample": sum(trainer.train_data.pooling),
        "steps": len(loaded_ms),
        **{f"{name}_{key}": getattr(timing, key) for name, timing in found.items() for key in _TIMES},
        "loaded_to_cached": found["loaded"].mean_ms / found["cached"].mean_ms,
        "input_wait_ms": waited_s * 1e3 / (_ROUNDS * (per_round + loader_warmup)),
        "samples_per_s": trainer.global_batch * 1e3 / found["loaded"].median_ms,
    }


def _time_steps(trainer: Trainer, batches: Iterator[Batch], steps: int, warmup: int) -> list[float]:
    """Return the times of `steps` steps in ms, after `warmup` steps that also refill the pipeline."""
    segment = itertools.islice(batches, steps + warmup)
    trainer.pipeline.reset()
    for _ in range(warmup):
        trainer.step(segment)
    timer = StepTimer(trainer.device)
    timer.mark()
    for _ in range(steps):
        trainer.step(segment)
        timer.mark()
    return timer.take_ms()
